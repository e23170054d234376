"""Sampling rules against distributions worked by hand."""

import pytest
import torch
from support import refuses

from gptattn.decode.sampling import Sampling

P = torch.tensor([[0.5, 0.25, 0.15, 0.1], [0.1, 0.2, 0.3, 0.4]], dtype=torch.float64)


def count_draws(sampling: Sampling, logits: torch.Tensor) -> torch.Tensor:
    """The share of each id in 50,000 draws; its standard deviation is 0.0022 at most."""
    generator = torch.Generator().manual_seed(1)
    drawn = sampling.draw(logits.repeat(50_000, 1), generator).view(-1, len(logits)).T
    counts = [torch.bincount(row, minlength=logits.shape[1]) for row in drawn]
    return torch.stack(counts).double() / drawn.shape[1]


@pytest.mark.parametrize(
    ("sampling", "weights"),
    [
        (Sampling(), P.tolist()),
        (Sampling(temperature=0.5), P.square().tolist()),
        (Sampling(top_k=2), [[2, 1, 0, 0], [0, 0, 3, 4]]),
        (Sampling(top_k=9), P.tolist()),
    ],
)
def test_what_is_kept_is_drawn_in_proportion(sampling, weights):
    expected = torch.tensor(weights, dtype=torch.float64)
    expected /= expected.sum(dim=-1, keepdim=True)
    shares = count_draws(sampling, P.log())
    assert ((shares > 0) == (expected > 0)).all()
    torch.testing.assert_close(shares, expected, atol=0.01, rtol=0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_logit_that_is_not_a_number_is_a_numeric_error(temperature):
    logits = torch.tensor([[0.0, 1.0, 2.0], [0.0, float("nan"), 2.0]])
    with refuses("logits: not finite", 5):
        Sampling(temperature=temperature).draw(logits, None)


def test_a_temperature_near_zero_is_greedy():
    logits = torch.tensor([[3.0, 5.0, float("-inf")], [-7.0, -9.0, -8.0]])
    for temperature in (1e-7, 1e-40, 1e-300):
        assert Sampling(temperature).draw(logits, None).tolist() == [[1], [0]]


def test_a_logit_of_minus_infinity_is_never_drawn():
    logits = torch.tensor([[0.0, float("-inf"), 1.0]])
    assert count_draws(Sampling(), logits)[0, 1] == 0
    assert Sampling(temperature=0).draw(logits, None).item() == 2


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", float("nan")), ("top_k", 0)],
)
def test_a_value_that_cannot_work_names_its_field(field, value):
    with refuses(f"{field}: "):
        Sampling(**{field: value})
