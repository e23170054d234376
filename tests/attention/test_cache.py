"""What caches hold, return and count, against a list of what was written."""

import pytest
import torch
from building import build_attention
from torch import Tensor

from gptattn.attention import (
    Cache,
    CacheGroup,
    Entry,
    MultiHeadAttention,
    Rule,
    Span,
    TokenCache,
    attend,
    new_token_cache,
)
from gptattn.position import LinearBias, RotaryPosition

FLOAT, CPU = torch.float32, torch.device("cpu")
CHUNKS = pytest.mark.parametrize(
    "chunks",
    [[1] * 13, [4, 1, 1, 1, 1, 5], [13], [3, 3, 7], [2, 1, 1, 9], [6, 1, 6]],
    ids=str,
)


def ring(window: int | None = 4, capacity: int = 20, batch: int = 2) -> TokenCache:
    entry = Entry(heads=1, size=1)
    return new_token_cache({"k": entry, "v": entry}, batch, capacity, FLOAT, CPU, window)


def tokens(start: int, stop: int, batch: int = 2) -> dict[str, Tensor]:
    """Keys equal to the number of their token, and values ten times that."""
    k = torch.arange(start, stop, dtype=FLOAT).expand(batch, 1, -1)[..., None]
    return {"k": k, "v": 10 * k}


@CHUNKS
@pytest.mark.parametrize("window", [1, 4, None])
def test_each_query_finds_every_key_of_its_window_at_its_position_once(chunks, window):
    cache = ring(window, capacity=13)
    for count in chunks:
        start, stop = cache.length, cache.length + count
        held, k_pos = cache.write(tokens(start, stop), range(start, stop))
        cache.advance(count)
        found = [int(x) for x in held["k"][0, 0, :, 0]]
        assert found == list(k_pos if isinstance(k_pos, range) else k_pos.tolist())
        assert len(set(found)) == len(found)
        oldest = 0 if window is None else max(0, start - window + 1)
        assert set(range(oldest, stop)) <= set(found)
        assert torch.equal(held["v"], 10 * held["k"])
    newest = range(13 - (window or 13), 13)
    assert sorted(cache.tensors["k"][1, 0, :, 0].tolist()) == list(newest)  # and no more


@CHUNKS
@pytest.mark.parametrize("window", [4, None])
def test_rows_that_are_padded_on_the_left_have_positions_of_their_own(chunks, window):
    cache, padding = ring(window, capacity=13, batch=3), torch.tensor([0, 2, 6])
    group = CacheGroup([cache], padding)
    for count in chunks:
        start, stop = cache.length, cache.length + count
        positions = group.next_positions(count)
        held, k_pos = cache.write(tokens(start, stop, 3), positions)
        group.advance(count)
        number = held["k"][:, 0, :, 0].long()
        expected = (number - padding[:, None]).clamp_min(-1)
        assert torch.equal(torch.as_tensor(k_pos).expand(3, -1), expected)
        newest = torch.arange(start, stop) - padding[:, None]
        assert torch.equal(torch.as_tensor(positions), newest.clamp_min(-1))


def test_a_capacity_is_not_overrun_and_a_small_one_is_no_ring():
    for cache in (ring(None, capacity=5), ring(window=8, capacity=5)):
        cache.write(tokens(0, 5))
        cache.advance(5)
        with pytest.raises(ValueError, match="capacity=5"):
            cache.write(tokens(5, 6))


def test_a_group_advances_all_and_counts_the_bytes_of_all():
    state = Cache({"state": torch.zeros(2, 3, 3)})
    group = CacheGroup([state, ring(), Cache({})])
    group.advance(5)
    assert [cache.length for cache in group.caches] == [5, 5, 5]
    assert group.length == 5
    # The ring: keys and values, two rows, four places, four bytes.
    assert group.nbytes == 18 * 4 + 2 * 2 * 4 * 4
    assert group.next_positions(2) == range(5, 7)


D, H, T, SINKS, WINDOW = 5, 6, 13, 2, 4


@pytest.mark.parametrize("position", [None, "rope", "alibi"])
@torch.no_grad()
def test_decoding_with_sinks_attends_to_them_and_the_window_in_place(position):
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

    def unseen(query: Span, key: Span) -> Tensor:
        hidden = (key.pos >= SINKS) & (key.pos <= query.pos - WINDOW)
        return torch.where(hidden, -torch.inf, 0.0)

    q, k, v = attention.project(x)
    rule = Rule(D**-0.5, bias=unseen)
    if position == "rope":
        q, k = encodings["rope"].rotate(q, k, range(T))
    if position == "alibi":
        running = encodings["alibi"].decay(range(T))
        rule = rule.with_decay(running, running)
    y = attend(q, k, v, rule, backend="reference")
    expected = attention.out_proj(y.transpose(1, 2).flatten(2))
    torch.testing.assert_close(torch.cat(outputs, 1), expected, rtol=0, atol=1e-12)
