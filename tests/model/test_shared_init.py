"""With shared_init, variants begin with the same weights where they have the same parameters."""

import hashlib
from collections.abc import Callable
from functools import cache

import pytest
import torch
from building import build_gpt, chosen, menu
from support import refuses
from torch import Tensor, nn

from gptattn.model.shared_init import DrawnByName

SIZES = ("model.d_model=48", "model.num_heads=4", "model.num_layers=2", "model.context_length=8")


@cache
def weights(
    *overrides: str, seed: int = 3, drawn: int = 0, shared: bool = True
) -> dict[str, Tensor]:
    """The weights of a model with this seed, after so many draws from torch's own generator."""
    torch.manual_seed(seed)
    torch.rand(drawn)
    model = build_gpt(*SIZES, *overrides, f"shared_init={str(shared).lower()}")
    return dict(model.named_parameters())


def test_a_weight_is_drawn_for_the_seed_and_its_name():
    for name, shape, std in (
        ("blocks.1.attention.W_query.weight", (48, 48), 0.02),
        ("blocks.0.mlp.down.weight", (48, 192), 0.02 / 2),  # of the 4 that write to the stream
    ):
        key = int(hashlib.sha256(f"3 {name} 0".encode()).hexdigest()[:8], 16)
        generator = torch.Generator().manual_seed(key)
        expected = torch.empty(shape).normal_(0.0, std, generator=generator)
        assert torch.equal(weights("attn=gqa")[name], expected)


# Drawn in their constructors.
OWN = {"conv.weight_C1K", "conv.bias_C", "a_log_H", "decay_bias_H", "decay_bias_C", "step_bias_H"}
OWN |= {"W_in_IDX", "W_out_IDD"}


@pytest.mark.parametrize("attn", menu("attn"))
def test_each_variant_shares_with_mha_what_both_have(attn):
    ours, base = weights(*chosen(attn)), weights("attn=mha", drawn=5)
    alike = [name for name in ours if name in base and ours[name].shape == base[name].shape]
    assert {"token_embedding.weight", "blocks.1.mlp.up.weight"} <= {*alike}
    assert all(torch.equal(ours[name], base[name]) for name in alike)
    plain, other = weights(*chosen(attn), shared=False), weights(*chosen(attn), seed=4)
    apart = weights(*chosen(attn), drawn=5)
    again = weights(*chosen(attn), shared=False, seed=4)
    random = [name for name, weight in plain.items() if not torch.equal(weight, again[name])]
    for name in random:
        if name.partition("attention.")[2] in OWN:
            continue
        assert torch.equal(ours[name], apart[name]), name
        assert not torch.equal(ours[name], other[name]), name
        assert not torch.equal(ours[name], plain[name]), name
        if plain[name].numel() > 1000:
            assert ours[name].std().item() == pytest.approx(plain[name].std().item(), rel=0.1)


def drawn_by_name(draw: Callable[[Tensor], object], before: int = 0) -> nn.Parameter:
    """A parameter that `draw` fills, after so many draws from torch's own generator."""
    module = nn.ParameterDict({"weight": nn.Parameter(torch.empty(8, 8))})
    torch.manual_seed(3)
    torch.rand(before)
    with DrawnByName(module) as mode, torch.no_grad():
        draw(module["weight"])
    mode.check()
    return module["weight"]


@pytest.mark.parametrize("draw", [nn.init.uniform_, nn.init.xavier_normal_])
def test_functions_of_torch_draw_by_name_too(draw):
    weight = drawn_by_name(draw)
    assert torch.equal(weight, drawn_by_name(draw, before=5))
    assert weight.std() > 0


@pytest.mark.parametrize("draw", [nn.init.orthogonal_, lambda w: w.copy_(torch.randn(8, 8))])
def test_what_draws_otherwise_is_refused(draw):
    with refuses("shared_init: draw"):
        drawn_by_name(draw)
