"""The recurrences in chunks against their definition for one token, in both kinds of decay.

The mechanisms with such a state are in test_recipes.py, as released, and in test_costs.py.
"""

import pytest
import torch
from contract import assert_agree, assert_same, draw
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from gptattn.attention.recurrence import chunked_delta, chunked_linear, count_flops, step

B, H, D, V = 2, 6, 5, 7
# Whether it follows the delta rule, decays by channel, and removes by keys of its own.
KINDS = pytest.mark.parametrize(
    "kind",
    [(False, False), (False, True), (True, False), (True, True), (False, True, True)],
    ids=["linear_by_head", "linear_by_channel", "delta_by_head", "delta_by_channel", "removal"],
)


def drawn(tokens: int, delta: bool, channels: bool, removes: bool = False) -> list[Tensor]:
    """Queries, keys of length 1, values, log decays and, for the delta rule, write strengths.

    Or what a removal finds, and where it writes that.
    """
    k = torch.nn.functional.normalize(draw(B, H, tokens, D), dim=-1)
    g = -draw(B, H, tokens, *[D] * channels).exp()
    inputs = [draw(B, H, tokens, D), k, draw(B, H, tokens, V), g]
    if removes:
        a = torch.nn.functional.normalize(draw(B, H, tokens, D), dim=-1)
        return [*inputs, -a, a * draw(B, H, tokens, D).sigmoid()]
    return [*inputs, draw(B, H, tokens).sigmoid()] if delta else inputs


def chunked(inputs: list[Tensor], s_BHDV: Tensor | None, chunk: int, start_BT=None):
    how = s_BHDV, chunk, start_BT
    if len(inputs) == 6:
        return chunked_delta(*inputs[:4], None, *how, inputs[4:])
    return (chunked_delta if len(inputs) == 5 else chunked_linear)(*inputs, *how)


def recurrent(inputs: list[Tensor], s_BHDV: Tensor) -> tuple[Tensor, Tensor]:
    """The outputs and the last state, one step after the other."""
    y = []
    for q, k, v, g, *more in zip(*(x.split(1, 2) for x in inputs), strict=True):
        beta, removal = (None, more) if len(more) == 2 else (*more, *[None] * (2 - len(more)))
        y_BHV, s_BHDV = step(q[:, :, 0], k, v, g[:, :, 0], beta, s_BHDV, removal)
        y.append(y_BHV)
    return torch.stack(y, 2), s_BHDV


@KINDS
@pytest.mark.parametrize(("tokens", "chunk"), [(1, 64), (7, 5), (131, 5), (131, 64)])
@pytest.mark.parametrize("continued", [False, True])
def test_chunks_match_the_steps_in_outputs_states_and_gradients(kind, tokens, chunk, continued):
    inputs, s = drawn(tokens, *kind), draw(B, H, D, V) * continued
    of = [x.requires_grad_() for x in inputs] + [s.requires_grad_()] * continued
    assert_agree(chunked(inputs, s if continued else None, chunk), recurrent(inputs, s), of)


@KINDS
def test_documents_are_as_rows_of_their_own(kind):
    lengths = [1, 9, 6, 3]
    inputs = drawn(sum(lengths), *kind)
    starts = [0, 1, 10, 16]
    start_BT = torch.repeat_interleave(torch.tensor(starts), torch.tensor(lengths)).expand(B, -1)
    y, last = chunked(inputs, None, 4, start_BT)
    alone = [
        chunked([x[:, :, a : a + n] for x in inputs], None, 4)
        for a, n in zip(starts, lengths, strict=True)
    ]
    assert_same(y, torch.cat([y for y, _ in alone], 2))
    assert_same(last, alone[-1][1])


def test_heads_that_share_a_key_are_as_heads_that_each_have_a_copy():
    q, k, v, g = drawn(53, delta=False, channels=False)
    q, k, s = q[:, :2], k[:, :2], draw(B, H, D, V)
    copies = [x.repeat_interleave(3, 1) for x in (q, k)]
    assert_same(chunked([q, k, v, g], s, 16), chunked([*copies, v, g], s, 16))
    assert_same(chunked([q, k, v, g[:1]], s, 16)[0][0], chunked([*copies, v, g], s, 16)[0][0])


@KINDS
def test_weak_decay_keeps_its_digits_in_a_chunk_with_strong_decay(kind):
    inputs = [x.float() for x in drawn(130, *kind)]
    g = -0.01 * inputs[3].abs()
    inputs[3] = torch.where(torch.rand_like(g) < 0.1, -1e5, g)
    s = torch.randn(B, H, D, V)
    expected = recurrent([x.double() for x in inputs], s.double())
    results = chunked([x.requires_grad_() for x in inputs], s, 64)
    for got, exact in zip(results, expected, strict=True):
        assert_same(got.double(), exact, atol=1e-5)
    gradients = torch.autograd.grad(sum(x.sum() for x in results), inputs)
    assert all(x.isfinite().all() for x in gradients)


@KINDS
@pytest.mark.parametrize(("tokens", "chunk"), [(12, 4), (11, 4), (7, 64)])
def test_flops_are_the_products_and_the_solve_of_the_chunks(kind, tokens, chunk):
    with FlopCounterMode(display=False) as products:
        chunked(drawn(tokens, *kind), None, chunk)
    (delta, channels, *_), removes = kind, len(kind) == 3
    solves = delta or removes
    N = -(-tokens // chunk)
    C = -(-tokens // N)
    uncounted = solves * N * C * (C - 1) * (V + D)  # the solve, which torch does not count
    if channels:  # the score of each token with itself is no product of matrices
        uncounted += N * 2 * D * (1 + solves) * (1 + removes) * (1 << (C - 1).bit_length())
    how = {"delta": solves, "channels": channels, "removes": removes}
    counted = count_flops(tokens, chunk, H, D, V, **how)
    assert B * (counted - H * uncounted) == products.get_total_flops()
