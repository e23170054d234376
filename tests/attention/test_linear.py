"""Prepared linear layers against torch's own; with gradients the same to the bit."""

import pytest
import torch

from gptattn.attention.linear import MAX_ROWS, Linear, PreparedWeight, prepare


@pytest.fixture(autouse=True)
def _small_weights_are_shared_among_threads_too(monkeypatch):
    monkeypatch.setattr("gptattn.attention.linear.MIN_BYTES", 0)


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("out", [1, 7, 12])
@pytest.mark.parametrize("bias", [True, False])
def test_one_row_gives_what_torch_gives(threads, out, bias):
    layer = torch.nn.Linear(11, out, bias=bias, dtype=torch.float64)
    one_row = (torch.randn(1, 1, 11), torch.randn(11), torch.randn(11, 1).T)
    for x in (*one_row, torch.randn(4, 11)):  # and four, which it is not prepared for
        x = x.double()
        with torch.no_grad():
            torch.testing.assert_close(PreparedWeight(layer, 1)(x), layer(x), rtol=0, atol=1e-13)


@pytest.mark.parametrize("given", [1, 4, MAX_ROWS + 1])
@pytest.mark.parametrize("rows", [1, 8, MAX_ROWS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_prepared_layer_gives_what_it_gives_unprepared(given, rows, dtype):
    layer, x = torch.nn.Linear(11, 6, dtype=dtype), torch.randn(given, 1, 11, dtype=dtype)
    with torch.no_grad():
        y = PreparedWeight(layer, rows)(x)
        expected = layer.double()(x.double())
    # Sums of 11 are below 4; bfloat16 rounds the result alone, to 8 bits.
    atol = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-7}[dtype]
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=atol)


def test_with_gradients_it_is_torchs_own_to_the_bit():
    layer, theirs = Linear(11, 6), torch.nn.Linear(11, 6)
    theirs.load_state_dict(layer.state_dict())
    x = torch.randn(1, 11)
    prepare(layer, 4)
    assert torch.equal(layer(x), theirs(x))
