"""With shared_init, variants begin with the same weights where they have the same parameters."""

import hashlib

import pytest
import torch
from building import build_gpt, chosen, menu
from torch import Tensor

SIZES = ("model.d_model=48", "model.num_heads=4", "model.num_layers=2", "model.context_length=8")


def weights(*overrides: str, seed: int = 3, shared: bool = True) -> dict[str, Tensor]:
    """The weights of a model with this seed, after other draws from torch's own generator."""
    torch.manual_seed(seed)
    torch.rand(len(overrides))
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


@pytest.mark.parametrize("attn", menu("attn"))
def test_each_variant_shares_with_mha_what_both_have(attn: str) -> None:
    ours, base = weights(*chosen(attn)), weights("attn=mha", "seed=1", "log_every=1")
    alike = [name for name in ours if name in base and ours[name].shape == base[name].shape]
    assert {"token_embedding.weight", "blocks.1.mlp.up.weight"} <= {*alike}
    assert all(torch.equal(ours[name], base[name]) for name in alike)
    plain, other = weights(*chosen(attn), shared=False), weights(*chosen(attn), seed=4)
    apart = weights(*chosen(attn), "seed=1", "log_every=1")  # torch's generator stands elsewhere
    # Short convolutions are drawn in their constructor, and some matrices begin at 0.
    drawn = [n for n, w in plain.items() if w.ndim > 1 and w.std() > 0 and "conv" not in n]
    for name in drawn:
        assert torch.equal(ours[name], apart[name]), name
        assert not torch.equal(ours[name], other[name]), name
        assert not torch.equal(ours[name], plain[name]), name
        assert ours[name].std().item() == pytest.approx(plain[name].std().item(), rel=0.3), name


def test_two_weights_of_one_shape_differ():
    found = weights()
    first, second = (found[f"blocks.{i}.attention.W_query.weight"] for i in (0, 1))
    assert not torch.equal(first, second)
    assert not torch.equal(first, found["blocks.0.attention.W_key.weight"])
