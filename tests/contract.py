"""What the contract tests share: sizes, comparisons, and decoding through a cache."""

from collections.abc import Sequence
from itertools import chain

import pytest
import torch
from building import CONTRACT, acts_in_heads, chosen, menu, parts_of, refused, takes
from torch import Tensor

from gptattn.attention import Attention, Cache, HasMaps, Shared
from gptattn.attention.softmax import SoftmaxAttention
from gptattn.attention.variants.short_conv import GatedShortConvolution

B, T, E = 2, 11, 30  # the context is filled

# Each mechanism with every position that acts in its heads, and with one of those that it does not
# know of, since they act on the embeddings: so each of these is with several mechanisms. A part is
# with one position; test_combinations.py has the others.
BEFORE = [name for name in menu("position") if not acts_in_heads(name)]
PLACED = pytest.mark.parametrize(
    ("variant", "position"),
    [
        (variant, position)
        for i, variant in enumerate(CONTRACT)
        for position in menu("position")
        if position == BEFORE[i % len(BEFORE)]
        or (acts_in_heads(position) and not parts_of(variant))
    ],
)


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


def assert_same(actual: object, expected: object, atol: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


def assert_agree(
    found: Tensor | Sequence[Tensor],
    expected: Tensor | Sequence[Tensor],
    of: Sequence[Tensor],
    atol: float = 1e-12,
) -> None:
    """Both outputs are the same, and so are the gradients of `of` from any loss of them."""
    assert_same(found, expected, atol)
    both = [[y] if isinstance(y, Tensor) else [*y] for y in (found, expected)]
    upstream = [torch.randn_like(y) for y in both[1]]
    keep = {"retain_graph": True, "materialize_grads": True}
    assert_same(*(torch.autograd.grad(y, of, upstream, **keep) for y in both), 10 * atol)


def with_maps(attention: Attention) -> HasMaps:
    """Return the attention as `HasMaps`; skip the test if it has no attention weights."""
    if not isinstance(attention, HasMaps):
        pytest.skip("has no attention maps")
    return attention


def receptive_field(attention: Attention) -> Tensor:
    """[T, T], True where output t may depend on input u: a window W is W tokens, its own too."""
    window = T
    if isinstance(attention, SoftmaxAttention):
        window = attention.rule().window or T
    elif isinstance(attention, GatedShortConvolution):
        window = attention.conv.size
    return torch.ones(T, T, dtype=torch.bool).tril().triu(1 - window)


def all_keys(variant: str) -> dict[str, int]:
    """Arguments with which a mechanism that chooses its keys chooses all."""
    return {"topk": T} if takes(variant, "topk") else {}


def outputs_and_gradients(attention: Attention, x: Tensor, upstream: Tensor) -> list[Tensor]:
    """The output, the layer's own losses, and the gradients of both together."""
    own: dict[str, list[Tensor]] = {}
    y = attention(x, None, Shared(range(x.shape[1]), losses=own))
    losses = list(chain(*own.values()))
    total = (y * upstream).sum() + sum(losses)
    return [y, *losses, *torch.autograd.grad(total, [x, *attention.parameters()])]


def overrides_of(variant: str, position: str) -> list[str]:
    """Return the overrides for a model of this variant; skip if it cannot have this position."""
    if acts_in_heads(position) and not takes(variant, "position"):
        pytest.skip("takes no position")
    if any(position in refused(part) for part in parts_of(variant)):
        pytest.skip("a pair that is refused")
    # Heads of 6: rotary positions need an even size.
    given = [*chosen(variant), f"position={position}", "model.d_model=36"]
    # Equal ids have equal scores in the first layer but for rounding, and ALiBi tells them apart.
    equal = position == "alibi" and takes(variant, "topk")
    return [*given, f"attn.topk={T}"] if equal else given


@torch.no_grad()
def decode(
    attention: Attention, x: Tensor, chunks: list[int], cache: Cache | None = None
) -> Tensor:
    """The outputs through this cache, or through the attention's own."""
    cache, y = cache or attention.new_cache(len(x), T), []
    for part in x.split(chunks, dim=1):
        y.append(attention(part, cache))
        cache.advance(part.shape[1])
    assert cache.length == T
    with pytest.raises(ValueError, match="context_length=11"):
        attention(x[:, :1], cache)
    return torch.cat(y, dim=1)
