"""Prepared and joined linear layers against torch's own; with gradients the same to the bit."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.nn.modules.module import register_module_forward_hook

from gptattn.attention.linear import MOST_ROWS, Joint, Linear, Prepared


@pytest.fixture(autouse=True)
def _small_weights_are_shared_among_threads_too(monkeypatch):
    monkeypatch.setattr("gptattn.attention.linear.WORTH_THREADS", 0)


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("out", [1, 2, 7, 12, 53])
@pytest.mark.parametrize("bias", [True, False])
def test_one_row_gives_what_torch_gives(threads, out, bias):
    layer = torch.nn.Linear(11, out, bias=bias, dtype=torch.float64)
    for x in (torch.randn(1, 1, 11), torch.randn(11), torch.randn(11, 1).T):
        x = x.double()
        with torch.no_grad():
            torch.testing.assert_close(Prepared([layer], 1)(x), layer(x), rtol=0, atol=1e-13)


@pytest.mark.parametrize("given", [1, 4, MOST_ROWS + 1])
@pytest.mark.parametrize("rows", [1, 2, 8, MOST_ROWS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_prepared_layers_give_what_each_gives_alone(threads, given, rows, dtype):
    layers = [torch.nn.Linear(11, out, dtype=dtype) for out in (6, 3, 5)]
    x = torch.randn(given, 1, 11, dtype=dtype)
    with torch.no_grad():
        together = Prepared(layers, rows)(x)
        expected = torch.cat([layer.double()(x.double()) for layer in layers], dim=-1)
    # Sums of 11 are below 4; bfloat16 rounds the result alone, to 8 bits.
    atol = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-7}[dtype]
    torch.testing.assert_close(together.double(), expected, rtol=0, atol=atol)


def test_a_torch_without_the_packed_layout_gives_the_same(monkeypatch):
    layer, x = torch.nn.Linear(11, 6), torch.randn(4, 11)
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace())
    with torch.no_grad():
        torch.testing.assert_close(Prepared([layer], 4)(x), layer(x), rtol=0, atol=0)


@pytest.mark.parametrize("rows", [1, 4])
def test_a_processor_without_bfloat16_gives_the_same(rows, monkeypatch):
    layer = torch.nn.Linear(11, 6, dtype=torch.bfloat16)
    x = torch.randn(rows, 11, dtype=torch.bfloat16)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    with torch.no_grad():
        torch.testing.assert_close(Prepared([layer], rows)(x), layer(x), rtol=0, atol=0)


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this processor has no AVX512"
)
@pytest.mark.parametrize("rows", [1, 2, MOST_ROWS])
def test_weights_in_bfloat16_are_packed(rows):
    assert Prepared([Linear(11, 6, dtype=torch.bfloat16)], rows).packed is not None


def test_a_layer_that_was_exchanged_is_called_and_not_passed_over():
    class Adapter(Linear):
        def forward(self, input):
            return super().forward(input) + 1

    layers = [Linear(4, 3), Adapter(4, 3)]
    joint, x = Joint(), torch.randn(1, 4)
    joint.prepare(layers, 2)
    with torch.no_grad():
        _, y = joint(x, layers)
        torch.testing.assert_close(y, F.linear(x, layers[1].weight, layers[1].bias) + 1)


@pytest.mark.parametrize("bias", [True, False])
def test_small_layers_give_one_after_the_other_what_they_give_together(bias, monkeypatch):
    layers = [Linear(11, out, bias=bias, dtype=torch.float64) for out in (6, 3, 5)]
    x = torch.randn(9, 4, 11, dtype=torch.float64, requires_grad=True)
    results = []
    for limit in (0, 2**20):
        monkeypatch.setattr("gptattn.attention.linear.JOINED_BYTES", limit)
        outputs = Joint()(x, layers)
        inputs = [x, *(p for layer in layers for p in layer.parameters())]
        grads = torch.autograd.grad([y.square().sum() for y in outputs], inputs)
        results.append([*outputs, *grads])
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-12)


def test_joining_is_thought_of_for_many_rows_only(monkeypatch):
    asked = []
    monkeypatch.setattr("gptattn.attention.linear._joinable", asked.append)
    layers = [Linear(4, 3), Linear(4, 3)]
    for rows, expected in ((MOST_ROWS, 0), (MOST_ROWS + 1, 1)):
        Joint()(torch.randn(rows, 4), layers)
        assert len(asked) == expected


def patched(layer, called):
    layer.forward = lambda x: [called.append(1), F.linear(x, layer.weight, layer.bias)][1]


WATCHED = {
    "forward hook": lambda layer, called: layer.register_forward_hook(lambda *_: called.append(1)),
    "backward hook": lambda layer, called: layer.register_full_backward_hook(
        lambda *_: called.append(1)
    ),
    "hook on all": lambda layer, called: register_module_forward_hook(
        lambda module, *_: called.append(1) if module is layer else None
    ),
    "patched": patched,
    "compiled": lambda layer, called: layer.compile(
        backend=lambda graph, _: [called.append(1), graph.forward][1]
    ),
}


@pytest.mark.parametrize("watch", WATCHED)
def test_a_layer_that_someone_watches_is_called(watch):
    layers, called = [Linear(4, 3), Linear(4, 3)], []
    handle = WATCHED[watch](layers[1], called)
    joint, x = Joint(), torch.randn(MOST_ROWS + 1, 4, requires_grad=True)
    torch.autograd.backward([y.sum() for y in joint(x, layers)])
    assert called
    called.clear()
    if watch != "compiled":  # only compiling adds to `called`, calling does not
        joint.prepare(layers, 2)
        with torch.no_grad():
            joint(x[:2], layers)
        assert bool(called) == (watch != "backward hook")
    if handle is not None:
        handle.remove()


def test_with_gradients_it_is_torchs_own_to_the_bit(threads):
    layer, theirs = Linear(11, 6), torch.nn.Linear(11, 6)
    theirs.load_state_dict(layer.state_dict())
    x = torch.randn(1, 11)
    layer.prepare(4)
    assert torch.equal(layer(x), theirs(x))


def test_a_seed_gives_torchs_weights():
    torch.manual_seed(5)
    ours = Linear(11, 6)
    torch.manual_seed(5)
    assert torch.equal(ours.weight, torch.nn.Linear(11, 6).weight)
