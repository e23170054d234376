"""Muon against a singular value decomposition in float64, the published texts, and torch's own."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from building import build_gpt, chosen, menu
from torch import Tensor, nn

from gptattn.optim.matrix_rule import CombinedAdamW, split_by_decay
from gptattn.optim.muon import (
    MAX_STEPS,
    Muon,
    choose_polynomials,
    compute_polar_factor,
    compute_whitener,
)

SHAPES = [(6, 6), (4, 12), (12, 4), (6, 6), (1, 5)]


def drawn() -> list[Tensor]:
    return [torch.randn(shape, dtype=torch.float64) for shape in SHAPES]


def polar(x: Tensor) -> Tensor:
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    return u @ vh


@pytest.mark.parametrize("nesterov", [True, False])
def test_directions_are_the_polar_factors_of_the_averages(nesterov):
    rule = Muon(momentum=0.8, nesterov=nesterov, rms=0.3, steps=7)
    averages = [torch.zeros(shape).double() for shape in SHAPES]
    states = [rule.new_state(matrix) for matrix in averages]
    # So few steps would not bring tiny singular values near 1.
    large = [9 * polar(x) for x in drawn()]
    for _ in range(3):
        gradients = [x + noise for x, noise in zip(large, drawn(), strict=True)]
        found = rule.directions(gradients, states)
        for i, g in enumerate(gradients):
            averages[i] = 0.8 * averages[i] + 0.2 * g
            x = 0.8 * averages[i] + 0.2 * g if nesterov else averages[i]
            expected = 0.3 * max(x.shape) ** 0.5 * polar(x)
            # The seventh polynomial's safety factor of 1.01 leaves 1 - 2e-6.
            torch.testing.assert_close(found[i], expected, rtol=0, atol=1e-5)
            torch.testing.assert_close(states[i]["momentum"], averages[i])


def iterate(x: Tensor, coefficients: Sequence[tuple[float, float, float]]) -> Tensor:
    for a, b, c in coefficients:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def jordan(x: Tensor, steps: int) -> Tensor:
    """Newton-Schulz as https://kellerjordan.github.io/posts/muon has it, but for bfloat16."""
    return iterate(x / (x.norm() + 1e-7), [(3.4445, -4.7750, 2.0315)] * steps)


def amsel(x: Tensor, steps: int) -> Tensor:
    """Polar Express as listing 2 of arXiv:2505.16932 has it, but for bfloat16."""
    listed = [
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
        (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
        (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
        (1.875, -1.25, 0.375),
    ]
    safe = [(a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in listed[:-1]] + [listed[-1]]
    x = x / (x.norm() * 1.01 + 1e-7)
    return iterate(x, safe[:steps] + [safe[-1]] * (steps - len(safe)))


@pytest.mark.parametrize(
    ("iteration", "published"), [("newton_schulz", jordan), ("polar_express", amsel)]
)
@pytest.mark.parametrize("steps", [1, 5, 8, 10])
def test_each_number_of_steps_is_the_published_one(iteration, published, steps):
    # Small, so that the 1e-7 beside the norm shows.
    x = 1e-5 * torch.randn(3, 4, 9, dtype=torch.float64)
    polynomials = choose_polynomials(iteration, steps)
    expected = torch.stack([published(one, steps) for one in x])
    torch.testing.assert_close(compute_polar_factor(x, polynomials), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(compute_whitener(x, polynomials) @ x, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("iteration", ["polar_express", "newton_schulz"])
@pytest.mark.parametrize("rank", [1, 29])
def test_in_float32_the_most_steps_keep_a_low_rank(iteration, rank):
    wide, narrow = torch.randn(3, rank, 131).double(), torch.randn(3, 31, rank).double()
    x, polynomials = narrow @ wide, choose_polynomials(iteration, MAX_STEPS)
    exact, single = compute_polar_factor(x, polynomials), x.float()
    for y in (
        compute_polar_factor(single, polynomials),
        compute_whitener(single, polynomials) @ single,
    ):
        assert (y - exact).norm() < 0.02 * exact.norm()


def test_a_matrix_of_zeros_stays_one():
    x, polynomials = torch.zeros(2, 3, 8), choose_polynomials("polar_express", 5)
    assert torch.equal(compute_polar_factor(x, polynomials), x)
    assert torch.equal(compute_whitener(x, polynomials) @ x, x)


def test_five_newton_schulz_steps_match_torchs_muon_up_to_bfloat16():
    ours, theirs = ([nn.Parameter(x.float()) for x in drawn()] for _ in range(2))
    for a, b in zip(ours, theirs, strict=True):
        b.data.copy_(a.data)
    reference = torch.optim.Muon(
        theirs, lr=0.1, weight_decay=0.5, momentum=0.9, adjust_lr_fn="match_rms_adamw"
    )
    rule = Muon(momentum=0.9, iteration="newton_schulz")
    optimizer = CombinedAdamW([{"params": ours, "by_rule": True}], rule, lr=0.1, weight_decay=0.5)
    start = [p.detach().clone() for p in ours]
    for _ in range(2):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        optimizer.step()
        reference.step()
    for p, a, b in zip(start, ours, theirs, strict=True):
        moved = (a - p).norm()
        assert (a - b).norm() < 0.05 * moved
        assert moved > 0


def test_the_others_take_steps_of_adamw_and_what_has_no_gradient_stays():
    matrix, vector, idle = nn.Parameter(torch.randn(3, 5)), torch.randn(4), torch.randn(2, 2)
    settings: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.2}
    ours, theirs, still = nn.Parameter(vector), nn.Parameter(vector.clone()), nn.Parameter(idle)
    groups = [{"params": [matrix, still], "by_rule": True}, {"params": [ours]}]
    optimizer = CombinedAdamW(groups, Muon(), **settings)
    reference = torch.optim.AdamW([theirs], **settings)
    before = still.detach().clone()
    for _ in range(3):
        matrix.grad, ours.grad = torch.randn_like(matrix), torch.randn_like(ours)
        theirs.grad = ours.grad.clone()
        optimizer.step()
        reference.step()
    assert torch.equal(ours, theirs)
    assert torch.equal(still, before)


def test_weights_in_bfloat16_are_orthogonalised_in_float32():
    shape, rule = (16, 64), Muon(momentum=0, nesterov=False, rms=1, steps=7)
    # Singular values from 1 down to 1e-3: their squares are lost in bfloat16.
    spread = polar(torch.randn(16, 16).double()) * torch.logspace(0, -3, 16)
    x = (spread @ polar(torch.randn(shape).double())).bfloat16()
    (found,) = rule.directions([x], [{"momentum": torch.zeros_like(x)}])
    torch.testing.assert_close(found.double() / 8, polar(x.double()), rtol=0, atol=0.05)


@pytest.mark.parametrize("variant", menu("attn"))
def test_matrices_decay_and_no_gain_bias_or_convolution_does(variant):
    model = build_gpt(*chosen(variant), "block.tied_head=false", "model.num_layers=2")
    decayed, others = split_by_decay(model.parameters())
    of_layers = model.layer_matrices()
    for name, parameter in model.named_parameters():
        matrix = name.endswith(".weight") and not ("norm" in name or "conv" in name)
        if matrix:
            assert any(parameter is one for one in decayed), name
        if "norm" in name or "conv" in name or name.endswith("bias"):
            assert any(parameter is one for one in others), name
            assert parameter not in of_layers, name
        assert (parameter in of_layers) <= name.startswith("blocks."), name
    assert model.layers()[0].mlp.down.weight in of_layers
