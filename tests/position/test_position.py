"""Rotary and learned positions: against transformers' Llama, and by their defining properties."""

import pytest
import torch
from torch import Tensor

from gptattn.position import LearnedPosition, RotaryPosition

B, H, G, T, D = 2, 6, 3, 11, 10


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def assert_same(actual: object, expected: object, atol: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


def test_each_pair_turns_by_its_own_angle():
    # Position 3, head size 4, base 100: pair (0, 2) turns by 3, pair (1, 3) by 3 * 100 ** -0.5.
    x = torch.tensor([2.0, 3.0, 5.0, 7.0], dtype=torch.float64)
    turned, _ = RotaryPosition(4, 4, base=100.0).rotate(*2 * [x[None, None, None]], range(3, 4))
    first, second = torch.tensor([3.0, 0.3], dtype=torch.float64)
    expected = [
        2 * first.cos() - 5 * first.sin(),
        3 * second.cos() - 7 * second.sin(),
        5 * first.cos() + 2 * first.sin(),
        7 * second.cos() + 3 * second.sin(),
    ]
    assert_same(turned[0, 0, 0], torch.stack(expected))


@pytest.mark.parametrize(("start", "tokens"), [(0, 4), (4, 7), (10, 1)])
def test_tokens_have_their_positions_whether_the_host_knows_them_or_not(start, tokens):
    q, k, x = draw(B, H, T, D), draw(B, G, T, D), draw(B, T, D)
    rope, span = RotaryPosition(T, D), slice(start, start + tokens)
    whole = rope.rotate(q, k, range(T))
    learned = LearnedPosition(T, D).double()
    torch.nn.init.normal_(learned.embedding.weight)
    assert torch.equal(learned(x, range(T)), x + learned.embedding.weight)
    known = range(start, start + tokens)
    for positions in (known, torch.tensor(known), torch.tensor([known, known])):
        part = rope.rotate(q[:, :, span], k[:, :, span], positions)
        assert_same(part, tuple(x[:, :, span] for x in whole))
        assert torch.equal(learned(x[:, span], positions), learned(x, range(T))[:, span])


def test_each_row_may_have_positions_of_its_own_and_none_where_no_token_is():
    q, k, x = draw(B, H, 3, D), draw(B, G, 3, D), draw(B, 3, D)
    rope, learned = RotaryPosition(T, D), LearnedPosition(T, D).double()
    torch.nn.init.normal_(learned.embedding.weight)
    positions = torch.tensor([[4, 5, 6], [-1, 0, 1]])
    turned, moved = rope.rotate(q, k, positions), learned(x, positions)
    for row, known in ((0, range(4, 7)), (1, range(2))):
        there = slice(3 - len(known), 3)
        alone = rope.rotate(q[row : row + 1, :, there], k[row : row + 1, :, there], known)
        assert_same([y[row : row + 1, :, there] for y in turned], list(alone))
        assert_same(moved[row : row + 1, there], learned(x[row : row + 1, there], known))


def test_far_positions_are_as_exact_as_near_ones():
    rope = RotaryPosition(context_length=100_000, head_dim=2)
    one = torch.tensor([1.0, 0.0])[None, None, None]
    turned, _ = rope.rotate(one, one, range(99_999, 100_000))
    angle = torch.tensor(99_999.0, dtype=torch.float64)
    expected = torch.stack([angle.cos(), angle.sin()]).float()
    assert_same(turned[0, 0, 0], expected, atol=1e-6)
