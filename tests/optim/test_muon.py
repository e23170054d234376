"""Muon against its definition with a singular value decomposition in float64, and torch's own."""

from typing import Any

import pytest
import torch
from building import build_gpt, chosen, menu
from torch import Tensor, nn

from gptattn.optim import Muon
from gptattn.optim.matrix_rule import CombinedAdamW, State, split_by_decay, state_shapes

SHAPES = [(6, 6), (4, 12), (12, 4), (6, 6), (1, 5)]


def drawn() -> list[Tensor]:
    return [torch.randn(shape, dtype=torch.float64) for shape in SHAPES]


def new_states(rule: Muon, dtype: torch.dtype = torch.float64) -> list[State]:
    return [
        {
            name: torch.zeros(own, dtype=dtype)
            for name, own in state_shapes(rule, torch.Size(shape)).items()
        }
        for shape in SHAPES
    ]


def polar(x: Tensor) -> Tensor:
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    return u @ vh


@pytest.mark.parametrize("nesterov", [True, False])
def test_directions_are_the_polar_factors_of_the_averages(nesterov: bool) -> None:
    rule = Muon(momentum=0.8, nesterov=nesterov, rms=0.3, steps=7)
    states, averages = new_states(rule), [torch.zeros(shape).double() for shape in SHAPES]
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


def test_with_five_newton_schulz_steps_it_is_torchs_muon_up_to_its_rounding_to_bfloat16() -> None:
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


def test_the_others_take_steps_of_adamw_and_what_has_no_gradient_stays() -> None:
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


def test_weights_in_bfloat16_are_orthogonalised_in_float32() -> None:
    shape, rule = (16, 64), Muon(momentum=0, nesterov=False, rms=1, steps=7)
    # Singular values from 1 down to 1e-3: their squares are lost in bfloat16.
    spread = polar(torch.randn(16, 16).double()) * torch.logspace(0, -3, 16)
    x = (spread @ polar(torch.randn(shape).double())).bfloat16()
    (found,) = rule.directions([x], [{"momentum": torch.zeros_like(x)}])
    torch.testing.assert_close(found.double() / 8, polar(x.double()), rtol=0, atol=0.05)


@pytest.mark.parametrize("variant", menu("attn"))
def test_matrices_decay_and_no_gain_bias_or_convolution_does(variant: str) -> None:
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


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"momentum": 1.0}, "momentum=1.0"),
        ({"steps": 8}, "steps=8"),
        ({"iteration": "newton"}, "iteration=newton"),
        ({"dtype": "bf16"}, "dtype=bf16"),
    ],
)
def test_a_value_that_cannot_work_is_named(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}"):
        Muon(**settings)
