"""Positions by hand: each encoding's numbers, and how they are read by position.

transformers has the numbers of a stretched context; tests/weights compares its whole Llama.
"""

import math

import pytest
import torch
from building import build_gpt, menu
from contract import assert_same, draw
from hugging import SIZES, keep_float64, rope
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama

from gptattn.position import LearnedPosition, LinearBias, RotaryPosition, SinusoidalPosition

B, H, G, T, D = 2, 6, 3, 11, 10


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
def test_tokens_have_their_positions_in_every_form(start, tokens):
    q, k, x = draw(B, H, T, D), draw(B, G, T, D), draw(B, T, D)
    rope, learned, sinusoidal = (
        RotaryPosition(T, D),
        LearnedPosition(T, D),
        SinusoidalPosition(T, D),
    )
    torch.nn.init.normal_(learned.double().embedding.weight)
    assert torch.equal(learned(x, range(T)), x + learned.embedding.weight)
    known, span = range(start, start + tokens), slice(start, start + tokens)
    for positions in (known, torch.tensor(known), torch.tensor([known, known])):
        part = rope.rotate(q[:, :, span], k[:, :, span], positions)
        assert_same(part, tuple(y[:, :, span] for y in rope.rotate(q, k, range(T))))
        for encoding in (learned, sinusoidal):
            whole = encoding(x, range(T))
            assert torch.equal(encoding(x[:, span], positions), whole[:, span])


def test_each_row_may_have_positions_of_its_own_and_none_where_no_token_is():
    q, k, x = draw(B, H, 3, D), draw(B, G, 3, D), draw(B, 3, D)
    rope, sinusoidal = RotaryPosition(T, D), SinusoidalPosition(T, D)
    positions = torch.tensor([[4, 5, 6], [-1, 0, 1]])
    turned, moved = rope.rotate(q, k, positions), sinusoidal(x, positions)
    for row, known in ((0, range(4, 7)), (1, range(2))):
        there = slice(3 - len(known), 3)
        alone = rope.rotate(q[row : row + 1, :, there], k[row : row + 1, :, there], known)
        assert_same([y[row : row + 1, :, there] for y in turned], list(alone))
        assert_same(moved[row : row + 1, there], sinusoidal(x[row : row + 1, there], known))
    assert torch.isfinite(moved).all()


def test_far_positions_are_as_exact_as_near_ones():
    rope = RotaryPosition(context_length=100_000, head_dim=2)
    one = torch.tensor([1.0, 0.0])[None, None, None]
    turned, _ = rope.rotate(one, one, range(99_999, 100_000))
    angle = torch.tensor(99_999.0, dtype=torch.float64)
    expected = torch.stack([angle.cos(), angle.sin()]).float()
    assert_same(turned[0, 0, 0], expected, atol=1e-6)


def test_sinusoids_match_the_paper_and_are_added_to_scaled_embeddings():
    # Width 4: the second pair turns 100 times slower than the first.
    x = torch.tensor([[2.0, 3.0, 5.0, 7.0]] * 3, dtype=torch.float64)[None]
    y = SinusoidalPosition(context_length=3, d_model=4)(x, range(3))
    for p in range(3):
        expected = [
            2 * 2.0 + math.sin(p),
            2 * 3.0 + math.cos(p),
            2 * 5.0 + math.sin(p / 100),
            2 * 7.0 + math.cos(p / 100),
        ]
        assert_same(y[0, p], torch.tensor(expected, dtype=torch.float64), atol=1e-7)


def test_far_sinusoids_are_exact_and_an_odd_width_ends_in_a_sine():
    y = SinusoidalPosition(100_000, 3)(torch.zeros(1, 1, 3), range(99_999, 100_000))
    angles = [99_999.0, 99_999.0 / 10_000 ** (2 / 3)]
    expected = [math.sin(angles[0]), math.cos(angles[0]), math.sin(angles[1])]
    assert_same(y[0, 0], torch.tensor(expected), atol=1e-6)


def test_alibis_slopes_are_the_papers():
    # Section 3: eight heads have 1/2, 1/4, ..., 1/256.
    assert LinearBias(8).slope_H.tolist() == [2.0**-i for i in range(1, 9)]
    assert LinearBias(1).slope_H.tolist() == [2.0**-8]
    # The authors' code, 12 heads: those of 8, then every second one of 16's.
    expected = [*(2.0**-i for i in range(1, 9)), *(2.0 ** -(i / 2) for i in (1, 3, 5, 7))]
    assert_same(LinearBias(12).slope_H, torch.tensor(expected, dtype=torch.float64))


def test_a_score_falls_by_the_slope_per_token_of_distance():
    bias = LinearBias(6)
    c_1HT = bias.decay(range(100, 100 + T))
    assert c_1HT.shape == (1, 6, T)
    for distance in range(T):
        fall = c_1HT[0, :, -1] - c_1HT[0, :, -1 - distance]
        assert_same(fall, -bias.slope_H * distance)
    rows = torch.tensor([[-1, 0, 1], [4, 5, 6]])
    assert bias.decay(rows).shape == (2, 6, 3)
    assert_same(bias.decay(rows)[1], bias.decay(range(4, 7))[0])
    assert_same(bias.decay(torch.arange(4, 7)), bias.decay(range(4, 7)))


def test_alibis_distances_stay_exact_far_away_and_in_16_bits():
    far = range(100_000, 100_003)
    near = LinearBias(12).decay(range(3))
    got = LinearBias(12).decay(far)
    assert_same(got.diff(dim=-1), near.diff(dim=-1), atol=1e-10)
    low = LinearBias(8).bfloat16().decay(far)  # slopes that are powers of two fit 16 bits
    assert_same(low.diff(dim=-1).double(), LinearBias(8).decay(range(3)).diff(dim=-1), atol=0)


@pytest.mark.parametrize(
    ("stretch", "original", "base"), [(2.0, 64, 10_000.0), (4.0, 16, 100.0), (11.0, 4096, 500.0)]
)
@pytest.mark.parametrize("fraction", [1.0, 0.4])
def test_a_stretched_context_turns_as_transformers_yarn_does(stretch, original, base, fraction):
    yarn = {
        "rope_type": "yarn",
        "factor": stretch,
        "original_max_position_embeddings": original,
        "partial_rotary_factor": fraction,
    }
    size = 80  # of heads: the ramp from 32 turns to 1 covers many pairs
    sizes = SIZES | {"head_dim": size, "hidden_size": H * size, "max_position_embeddings": 4096}
    config = LlamaConfig(**sizes, rope_parameters=rope(base, **yarn))
    length = 97
    q = torch.randn(1, H, length, size, dtype=torch.float64)
    with keep_float64():
        cos, sin = modeling_llama.LlamaRotaryEmbedding(config)(q, torch.arange(length)[None])
    turned = int(fraction * size)
    assert cos.shape[-1] == turned
    expected, _ = modeling_llama.apply_rotary_pos_emb(q[..., :turned], q[..., :turned], cos, sin)
    position = RotaryPosition(length, size, base, fraction, stretch, original)
    got, _ = position.rotate(q, q, range(length))
    torch.testing.assert_close(got[..., :turned], expected, rtol=0, atol=1e-11)
    assert torch.equal(got[..., turned:], q[..., turned:])


def test_a_context_was_as_long_as_its_stretch_says_before():
    long = RotaryPosition(4096, 64, stretch=4.0)
    explicit = RotaryPosition(4096, 64, stretch=4.0, original_context=1024)
    assert torch.equal(explicit.cos_TR, long.cos_TR)


@pytest.mark.parametrize("position", menu("position"))
def test_only_learned_positions_have_parameters_and_none_is_saved(position):
    model = build_gpt(f"position={position}", "model.d_model=36")
    own = [name for name in model.state_dict() if "position" in name]
    assert own == ["input_position.embedding.weight"] * (position == "learned")
