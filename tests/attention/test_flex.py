"""The backend `flex`: outputs on a CPU, gradients where there is a GPU, and what it refuses."""

import pytest
import torch
from building import build_attention, class_of, slow_but, takes
from support import refuses
from torch import Tensor

from gptattn.attention import Rule, SoftmaxAttention, Span, attend
from gptattn.attention.core import by_flex
from gptattn.attention.rule import Decay
from gptattn.position import Documents

H, G, T, D = 6, 2, 150, 16
SINK_H = torch.linspace(-1, 1, H)
C_BHT = -torch.linspace(0, 3, T) * torch.linspace(0.5, 2, H)[None, :, None]
RULES = {
    "plain": Rule(0.3),
    "window and sink": Rule(0.3, window=37, sink_H=SINK_H),
    "all": Rule(0.3, 37, 0.8, None, SINK_H, Decay(C_BHT, C_BHT)),
}
EVERY_RULE = pytest.mark.parametrize("name", slow_but({"all"}, [*RULES]))


def draw(device: str = "cpu") -> list[Tensor]:
    return [torch.randn(2, heads, T, D, device=device) for heads in (H, G, G)]


@EVERY_RULE
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@torch.no_grad()
def test_flex_is_the_reference_in_outputs(name):
    rule, (q, k, v) = RULES[name], draw()
    expected = attend(q, k, v, rule, backend="reference")
    y = by_flex(q, k, v, rule, range(T))
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-5)
    at = {"q_pos": range(T - 3, T), "k_pos": range(T)}
    if rule.decay is None:
        few = attend(q[:, :, -3:], k, v, rule, **at, backend="flex")
        torch.testing.assert_close(few, expected[:, :, -3:], rtol=0, atol=1e-5)
    documents = Documents(torch.tensor([[0] * 40 + [40] * (T - 40), [0] * T]))
    at = {"q_pos": documents, "k_pos": documents}
    expected = attend(q, k, v, rule, **at, backend="reference")
    y = by_flex(q, k, v, rule, documents)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="its backward needs CUDA")
@pytest.mark.filterwarnings("ignore:.*(torch.jit.script_method|The .grad attribute)")  # of torch
@EVERY_RULE
def test_flex_is_the_reference_in_gradients(name):
    rule = RULES[name]
    inputs = [x.requires_grad_() for x in draw("cuda")]
    sink_H, c = SINK_H.cuda().requires_grad_(), C_BHT.cuda().requires_grad_()
    decay = None if rule.decay is None else Decay(c, c)
    sink = None if rule.sink_H is None else sink_H
    rule = Rule(rule.scale, rule.window, rule.softcap, None, sink, decay)
    results = []
    for backend in ("reference", "flex"):
        y = attend(*inputs, rule, backend=backend)
        every = (*inputs, sink_H, c)
        results.append(torch.autograd.grad(y.square().sum(), every, materialize_grads=True))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-3)


def test_what_flex_cannot_do_is_refused_in_one_line():
    def bias(query: Span, key: Span) -> Tensor:
        return query.pos - key.pos

    q, k, v = draw()
    with torch.no_grad(), pytest.raises(ValueError, match="bias"):
        attend(q, k, v, Rule(1.0, bias=bias), backend="flex")
    with torch.no_grad(), pytest.raises(ValueError, match="dropout"):
        attend(q, k, v, Rule(1.0), dropout=0.1, backend="flex")


def test_flex_is_refused_when_a_layer_is_built_without_a_gpu_or_with_dropout(variant, monkeypatch):
    if not takes(variant, "backend") or not issubclass(class_of("attn", variant), SoftmaxAttention):
        pytest.skip("has no such backend")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with refuses("*: CUDA"):
        build_attention(variant, backend="flex")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    if takes(variant, "topk"):
        with refuses("*: choose keys"):
            build_attention(variant, backend="flex")
        return
    build_attention(variant, backend="flex")
    with refuses("*: dropout"):
        build_attention(variant, backend="flex", dropout=0.1)
