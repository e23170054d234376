"""What `attend` allocates, and how precise it is."""

import pytest
import torch
from building import Allocations
from torch import Tensor

from gptattn.attention import Rule, attend
from gptattn.attention.rule import Decay

C_BHT = -torch.rand(2, 6, 4096).cumsum(-1)
KINDS = {
    "window": {},
    "all": {"softcap": 0.7, "sink_H": torch.ones(6)},
    "window and dropout": {"dropout": 0.3},
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_with_a_window_training_allocates_the_same_for_each_token_of_any_context(kind):
    kind, per_token = dict(kind), []
    dropout = kind.pop("dropout", 0.0)
    for T in (1024, 4096):
        q, k, v = (torch.randn(2, heads, T, 32, requires_grad=True) for heads in (6, 2, 2))
        rule = Rule(0.6, window=37, **kind)
        if kind:
            rule = rule.with_decay(C_BHT[..., :T], C_BHT[..., :T])
        with Allocations() as made:
            attend(q, k, v, rule, dropout=dropout).sum().backward()
        per_token.append(made.bytes / T)
    assert per_token[1] == pytest.approx(per_token[0], rel=0.1)


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
