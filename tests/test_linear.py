"""The quick linear layer against torch's own, and with gradients torch's own itself."""

import pytest
import torch
import torch.nn.functional as F

from gptattn.attention.linear import FEW_ROWS, Linear, linear


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("rows", [(1,), (3, 1), (2, 5), (FEW_ROWS,), (FEW_ROWS + 1,)])
@pytest.mark.parametrize("out", [1, 2, 7, 12, 53])
@pytest.mark.parametrize("bias", [True, False])
def test_it_gives_what_torch_gives(threads, rows, out, bias):
    x = torch.randn(*rows, 11, dtype=torch.float64)
    w = torch.randn(out, 11, dtype=torch.float64)
    b = torch.randn(out, dtype=torch.float64) if bias else None
    with torch.no_grad():
        torch.testing.assert_close(linear(x, w, b), F.linear(x, w, b), rtol=0, atol=1e-13)


def test_what_is_read_need_not_be_contiguous(threads):
    x = torch.randn(11, 3, dtype=torch.float64).T
    w = torch.randn(8, 11, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(linear(x, w), F.linear(x, w), rtol=0, atol=1e-13)


def test_with_gradients_it_is_torchs_own_to_the_bit(threads):
    layer, theirs = Linear(11, 6), torch.nn.Linear(11, 6)
    theirs.load_state_dict(layer.state_dict())
    x = torch.randn(3, 11)
    assert torch.equal(layer(x), theirs(x))


def test_a_seed_gives_torchs_weights():
    torch.manual_seed(5)
    ours = Linear(11, 6)
    torch.manual_seed(5)
    assert torch.equal(ours.weight, torch.nn.Linear(11, 6).weight)
