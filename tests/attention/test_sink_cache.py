"""A cache of the first tokens and the newest, against a mask in float64."""

import math

import pytest
import torch
from building import build_attention
from torch import Tensor

from gptattn.attention import MultiHeadAttention, TokenCache
from gptattn.position import LinearBias, RotaryPosition


def numbered(capacity: int, sinks: int) -> TokenCache:
    return TokenCache({"k": torch.full((2, 1, capacity, 1), -1.0)}, capacity - sinks, sinks)


@pytest.mark.parametrize(("sinks", "window"), [(2, 3), (0, 4), (3, 1), (1, 7)])
def test_it_holds_the_first_tokens_and_the_newest_and_says_which_is_where(
    sinks: int, window: int
) -> None:
    cache = numbered(sinks + window, sinks)
    for t in range(17):
        held, k_pos = cache.write({"k": torch.full((2, 1, 1, 1), float(t))}, range(t, t + 1))
        cache.advance(1)
        found = held["k"][0, 0, :, 0].tolist()
        assert found == list(k_pos if isinstance(k_pos, range) else k_pos.tolist())
        newest = range(max(sinks, t + 1 - window), t + 1)
        assert sorted(found) == [*range(min(sinks, t + 1)), *newest]
        assert cache.newest("k").unique().tolist() == [t]


def test_a_longer_step_is_refused_once_it_would_overwrite() -> None:
    cache = numbered(5, sinks=2)
    cache.write({"k": torch.zeros(2, 1, 4, 1)})
    cache.advance(4)
    with pytest.raises(ValueError, match="2 tokens at once; a full cache with sinks takes one"):
        cache.write({"k": torch.zeros(2, 1, 2, 1)})


D, H, T, SINKS, WINDOW = 5, 6, 13, 2, 4


def masked(attention: MultiHeadAttention, x: Tensor, bias_HTS: Tensor) -> Tensor:
    """Softmax attention written out, over the sinks and the window alone."""
    q, k, v = attention.project(x)
    if attention.position is not None:
        q, k = attention.position.rotate(q, k, range(T))
    i, j = torch.arange(T)[:, None], torch.arange(T)[None]
    seen = (j <= i) & ((j < SINKS) | (j > i - WINDOW))
    score = q @ k.mT / math.sqrt(D) + bias_HTS
    y = score.masked_fill(~seen, -math.inf).softmax(-1) @ v
    assert attention.out_proj is not None
    return attention.out_proj(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("position", [None, "rope", "alibi"])
@torch.no_grad()
def test_decoding_equals_a_mask_in_float64_with_the_positions_of_the_text(
    position: str | None,
) -> None:
    encodings = {"rope": RotaryPosition(T, D, fraction=0.8), "alibi": LinearBias(H)}
    encoding = None if position is None else encodings[position]
    attention = build_attention("mha", context_length=T, position=encoding).double().eval()
    assert isinstance(attention, MultiHeadAttention)
    x = torch.randn(2, T, H * D, dtype=torch.float64)
    like = attention.new_cache(2, SINKS + WINDOW)
    assert isinstance(like, TokenCache)
    cache, outputs = TokenCache(like.tensors, WINDOW, SINKS), []
    for t in range(T):
        outputs.append(attention(x[:, t : t + 1], cache))
        cache.advance(1)
    bias_HTS = torch.zeros(H, T, T, dtype=torch.float64)
    if isinstance(encoding, LinearBias):
        distance = torch.arange(T)[:, None] - torch.arange(T)[None]
        bias_HTS = -encoding.slope_H[:, None, None] * distance
    expected = masked(attention, x, bias_HTS)
    torch.testing.assert_close(torch.cat(outputs, 1), expected, rtol=0, atol=1e-12)
