"""attend() by every kind of rule and position: against plain loops, and backend against backend.

Also what it allocates, and how precise it is.
"""

import math
from collections.abc import Callable
from itertools import product

import pytest
import torch
from building import Allocations, slow_but
from contract import assert_agree, assert_same, draw
from torch import Tensor

from gptattn.attention import Rule, Span, attend, attention_weights
from gptattn.attention.rule import Decay
from gptattn.attention.softmax import seen_pairs
from gptattn.position import Positions

BACKENDS = pytest.mark.parametrize("backend", ["reference", "sdpa"])
B, H, G, D = 2, 6, 2, 5
SLOPE_H11 = torch.linspace(0.1, 0.6, H, dtype=torch.float64)[:, None, None]


def alibi(query: Span, key: Span) -> Tensor:
    return SLOPE_H11 * (key.pos - query.pos)


def rows(positions: Positions) -> list[list[int]]:
    """The positions of each of the B rows."""
    if isinstance(positions, range):
        return [list(positions)] * B
    return positions.expand(B, -1).tolist()


def loops(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: Rule,
    q_pos: Positions,
    k_pos: Positions,
    bias: Callable[[int, int, int, int, int], Tensor] | None = None,
) -> Tensor:
    """Compute attention pair by pair; bias(row, head, query's and key's index, distance)."""
    y = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype)
    for b in range(B):
        for h in range(H):
            g = h // (H // k.shape[1])
            for t, i in enumerate(rows(q_pos)[b]):
                terms, total = [], torch.zeros((), dtype=q.dtype)
                if rule.sink_H is not None:
                    total = rule.sink_H[h].exp()
                for s, j in enumerate(rows(k_pos)[b]):
                    if j < 0 or j > i or (rule.window is not None and j <= i - rule.window):
                        continue
                    if rule.chunk is not None and i // rule.chunk != j // rule.chunk:
                        continue
                    score = q[b, h, t] @ k[b, g, s] * rule.scale
                    if rule.softcap is not None:
                        score = rule.softcap * (score / rule.softcap).tanh()
                    if bias is not None:
                        score = score + bias(b, h, t, s, i - j)
                    total = total + score.exp()
                    terms.append(score.exp() * v[b, g, s])
                if terms:
                    y[b, h, t] = torch.stack(terms).sum(0) / total
    return y


PLACES: dict[str, tuple[Positions, Positions]] = {
    "from the start": (range(7), range(7)),
    "after others": (range(6, 9), range(9)),
    "one token": (range(8, 9), range(9)),
    "keys from later on": (range(6, 9), range(2, 9)),
    "keys that are not seen yet": (range(3, 5), range(9)),
    "before all keys": (range(1, 4), range(2, 9)),
    "a ring": (torch.tensor([8]), torch.tensor([5, 6, 7, 8, 4])),
    "a ring at a known position": (range(8, 9), torch.tensor([5, 6, 7, 8, 4])),
    "padded": (
        torch.tensor([[0, 1, 2, 3], [-1, -1, 0, 1]]),
        torch.tensor([[0, 1, 2, 3], [-1, -1, 0, 1]]),
    ),
    "a padded cache": (
        torch.tensor([[4], [2]]),
        torch.tensor([[0, 1, 2, 3, 4], [-1, -1, 0, 1, 2]]),
    ),
}
RULES = {
    "plain": {},
    "window": {"window": 3},
    "chunk": {"window": 3, "chunk": 3},
    "soft cap": {"softcap": 0.7},
    "sink": {"sink_H": draw(H)},
    "all": {"window": 3, "softcap": 0.7, "sink_H": draw(H)},
}


# All at once in every place, and each alone in two.
CASES = [
    (rule, places)
    for rule in RULES
    for places in PLACES
    if rule == "all" or places in ("after others", "padded")
]


def inputs_at(q_pos: Positions, k_pos: Positions) -> list[Tensor]:
    """Queries, keys and values for these positions."""
    T, S = len(rows(q_pos)[0]), len(rows(k_pos)[0])
    q, k, v = draw(B, H, T, D), draw(B, G, S, D), draw(B, G, S, D + 2)
    return [x.requires_grad_() for x in (q, k, v)]


@pytest.mark.parametrize(("rule", "places"), CASES)
def test_attend_does_what_plain_loops_do_in_outputs_and_gradients(rule, places):
    rule, (q_pos, k_pos) = dict(RULES[rule]), PLACES[places]
    inputs = [q, k, v] = inputs_at(q_pos, k_pos)
    if "sink_H" in rule:
        rule["sink_H"] = rule["sink_H"].clone().requires_grad_()
        inputs = [*inputs, rule["sink_H"]]
    rule = Rule(0.6, **rule)
    expected = loops(q, k, v, rule, q_pos, k_pos)
    for backend in ("reference", "sdpa"):
        y = attend(q, k, v, rule, q_pos=q_pos, k_pos=k_pos, backend=backend)
        assert_agree(y, expected, inputs)
    w_BHTS = attention_weights(q, k, rule, q_pos=q_pos, k_pos=k_pos)
    assert_same(w_BHTS @ v.repeat_interleave(H // G, dim=1), expected)


@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
def test_a_bias_follows_the_cap_and_passes_gradients_to_its_closure(places):
    q, k, v = inputs_at(*places)
    at_q, at_k = draw(*q.shape[:3]).requires_grad_(), draw(1, H, k.shape[2]).requires_grad_()
    slope_H = draw(H).requires_grad_()

    def bias(query: Span, key: Span) -> Tensor:
        distance = query.pos - key.pos
        return query.of(at_q) * key.of(at_k) - slope_H[:, None, None] * distance

    def one_by_one(b: int, h: int, t: int, s: int, distance: int) -> Tensor:
        return at_q[b, h, t] * at_k[0, h, s] - slope_H[h] * distance

    expected = loops(q, k, v, Rule(0.6, softcap=0.9), *places, one_by_one)
    rule = Rule(0.6, softcap=0.9, bias=bias)
    for backend in ("reference", "sdpa"):
        y = attend(q, k, v, rule, q_pos=places[0], k_pos=places[1], backend=backend)
        assert_agree(y, expected, (at_q, at_k, slope_H))


LONG = {
    "window": Rule(0.4, window=200),
    "window within a block": Rule(0.4, window=9),
    "window of all": Rule(0.4, window=300),
    "chunks": Rule(0.4, window=200, chunk=200),
    "chunks within a block": Rule(0.4, window=9, chunk=9),
    "chunks of all": Rule(0.4, window=300, chunk=300),
    "a window within a chunk": Rule(0.4, window=9, chunk=400),
    "soft cap": Rule(0.4, softcap=0.8),
    "bias": Rule(0.4, bias=alibi),
    "sink": Rule(0.4, sink_H=torch.linspace(-1, 1, H, dtype=torch.float64)),
    "all": Rule(0.4, 200, 0.8, alibi, torch.linspace(-1, 1, H, dtype=torch.float64)),
}


# Positions that the host knows, and those of rows that are padded.
QUICK = {("window", True), ("chunks", False), ("soft cap", True), ("all", True), ("all", False)}


@pytest.mark.parametrize("case", slow_but(QUICK, [*product(LONG, (True, False))]), ids=str)
def test_blocks_of_queries_are_the_whole(case):
    rule, known = LONG[case[0]], case[1]
    T, held = 300, 57  # two whole blocks and a part
    q_pos, k_pos = range(held, held + T), range(held + T)
    inputs = inputs_at(q_pos, k_pos)
    if not known:
        padding_B1 = torch.tensor([[0], [60]])
        q_pos, k_pos = ((torch.tensor(at) - padding_B1).clamp_min(-1) for at in (q_pos, k_pos))
    at = {"q_pos": q_pos, "k_pos": k_pos}
    whole, blocks = (attend(*inputs, rule, **at, backend=one) for one in ("reference", "sdpa"))
    assert_agree(blocks, whole, inputs, atol=1e-11)


def test_a_query_that_sees_nothing_gives_zeros_and_finite_gradients():
    q, k, v = (draw(1, 1, 3, D).requires_grad_() for _ in range(3))
    nowhere = torch.full((3,), -1)

    def hidden(query: Span, key: Span) -> Tensor:
        return torch.full((1, 1, 1, 1), -math.inf, dtype=torch.float64)

    for backend in ("reference", "sdpa"):
        for rule, at in ((Rule(0.5), nowhere), (Rule(0.5, bias=hidden), None)):
            y = attend(q, k, v, rule, q_pos=at, k_pos=at, backend=backend)
            assert y.count_nonzero() == 0
            gradients = torch.autograd.grad(y.sum(), (q, k, v))
            assert all(torch.isfinite(g).all() for g in gradients)


@BACKENDS
@pytest.mark.parametrize("rule", LONG.values(), ids=LONG)
def test_dropout_drops_weights_and_scales_up_the_rest_by_every_rule(backend, rule):
    T = 150
    q, k = draw(1, H, T, D), draw(1, H, T, D)
    v = torch.eye(T, dtype=torch.float64).expand(1, H, T, T)  # the output is the weights
    whole = attend(q, k, v, rule, backend="reference")
    dropped = attend(q, k, v, rule, dropout=0.25, backend=backend)
    kept = dropped != 0
    assert_same(dropped, torch.where(kept, whole / 0.75, 0.0))
    assert 0.7 < kept[whole != 0].double().mean() < 0.8


C_BHT = -torch.rand(2, 6, 1152).cumsum(-1)
KINDS = {
    "window": {},
    "all": {"softcap": 0.7, "sink_H": torch.ones(6)},
    "window and dropout": {"dropout": 0.3},
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_windowed_training_allocates_the_same_per_token_at_any_context(kind):
    kind, per_token = dict(kind), []
    dropout = kind.pop("dropout", 0.0)
    for T in (384, 1152):
        q, k, v = (torch.randn(2, heads, T, 32, requires_grad=True) for heads in (6, 2, 2))
        rule = Rule(0.6, window=37, **kind)
        if kind:
            rule = rule.with_decay(C_BHT[..., :T], C_BHT[..., :T])
        with Allocations() as made:
            attend(q, k, v, rule, dropout=dropout).sum().backward()
        per_token.append(made.bytes / T)
    assert per_token[1] == pytest.approx(per_token[0], rel=0.1)


def test_a_decay_of_thousands_of_tokens_loses_no_precision():
    T, last, most = 2048, 61, 2.8  # down to -2,900
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


def test_the_last_queries_of_a_row_see_their_chunk_their_window_or_all():
    # Queries 3 to 6 of 7 tokens: in chunks of 3 they see 1, 2, 3 and 1 keys.
    assert seen_pairs(4, 7, Rule(1.0, chunk=3)) == 1 + 2 + 3 + 1
    assert seen_pairs(4, 7, Rule(1.0, window=2, chunk=3)) == 1 + 2 + 2 + 1
    assert seen_pairs(4, 7, Rule(1.0, window=5)) == 4 + 5 + 5 + 5
    assert seen_pairs(4, 7, Rule(1.0)) == 4 + 5 + 6 + 7
