"""Paths of `attend`: what they cost, how precise they are, and what compiling changes."""

from dataclasses import replace

import pytest
import torch
from building import Allocations
from torch import Tensor

from gptattn.attention import Rule, attend
from gptattn.attention.rule import Decay

H, G, D = 6, 2, 5


def draw(T: int, dtype: torch.dtype = torch.float32, D: int = D) -> list[Tensor]:
    """Return q, k, v, sinks and a falling running sum; all ask for gradients."""
    drawn = [torch.randn(2, T, heads, D).transpose(1, 2) for heads in (H, G, G)]
    drawn += [torch.randn(H), -torch.rand(2, H, T).cumsum(-1)]
    return [x.to(dtype).requires_grad_() for x in drawn]


KINDS = {
    "window": {"window": 37},
    "all": {"window": 37, "softcap": 0.7, "sink": True, "decay": True},
    "window and dropout": {"window": 37, "dropout": 0.3},
}


def output(
    inputs: list[Tensor],
    backend: str = "sdpa",
    *,
    window: int | None = None,
    softcap: float | None = None,
    sink: bool = False,
    decay: bool = False,
    dropout: float = 0.0,
) -> Tensor:
    q, k, v, sink_H, c = inputs
    rule = Rule(0.6, window, softcap, None, sink_H if sink else None)
    rule = replace(rule, decay=Decay(c, c)) if decay else rule
    return attend(q, k, v, rule, dropout=dropout, backend=backend)


def results(y: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    upstream = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
    return [y, *torch.autograd.grad(y, inputs, upstream, materialize_grads=True)]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_with_a_window_training_allocates_the_same_for_each_token_of_any_context(kind):
    per_token = []
    for T in (1024, 4096):
        inputs = draw(T, D=32)
        with Allocations() as made:
            output(inputs, **kind).sum().backward()
        per_token.append(made.bytes / T)
    assert per_token[1] == pytest.approx(per_token[0], rel=0.1)


# torch's own: its compiler makes an instance of the function's class.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiling_changes_no_output_and_no_gradient():
    inputs, kind = draw(300, torch.float64), KINDS["all"]
    torch.compiler.reset()
    compiled = torch.compile(output, backend="aot_eager", fullgraph=True)
    expected = results(output(inputs, **kind), inputs)
    torch.testing.assert_close(
        results(compiled(inputs, **kind), inputs), expected, rtol=0, atol=1e-13
    )


def test_a_decay_of_thousands_of_tokens_loses_no_precision():
    T, last, most = 4096, 61, 1.4  # down to -2,900
    q, k, v = (torch.randn(1, heads, T, 64) for heads in (2, 1, 1))
    # The sum is float64, as a forget gate's and ALiBi's are: in float32 -2,900 is off by 1e-4.
    c = -(most * torch.rand(1, 2, T, dtype=torch.float64)).cumsum(-1)
    inputs = [x.requires_grad_() for x in (q, k, v, c)]
    wide = [x.detach().double().requires_grad_() for x in inputs]

    def gradients(backend: str, q: Tensor, k: Tensor, v: Tensor, c: Tensor) -> list[Tensor]:
        at = {"q_pos": range(T - last, T), "k_pos": range(T)}
        if backend == "sdpa":  # all queries: the path of training
            y = attend(q, k, v, Rule(64**-0.5, decay=Decay(c, c)))[:, :, -last:]
        else:
            rule = Rule(64**-0.5, decay=Decay(c[..., -last:], c))
            y = attend(q[:, :, -last:], k, v, rule, **at, backend=backend)
        return [y, *torch.autograd.grad(y.square().sum(), (q, k, v, c))]

    pairs = zip(gradients("sdpa", *inputs), gradients("reference", *wide), strict=True)
    for actual, expected in pairs:
        assert (actual - expected).abs().max() < 1e-5 * expected.abs().max().clamp_min(1.0)
