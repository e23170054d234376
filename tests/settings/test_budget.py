"""The budget and the learning-rate schedule, against values worked by hand."""

from dataclasses import replace

import pytest

from gptattn.settings.budget import Budget, learning_rate_factor, resolve_budget
from gptattn.settings.config import BudgetConfig, OptimConfig

OPTIM = OptimConfig(
    lr=1.0,
    final_lr_fraction=0.1,
    warmup_fraction=0.0,
    beta1=0.9,
    beta2=0.99,
    eps=1e-8,
    weight_decay=0.1,
    grad_clip=1.0,
)


@pytest.mark.parametrize(
    ("steps", "tokens", "seconds", "flops", "expected"),
    [
        (None, None, None, None, Budget(steps=70, seconds=None)),
        (3, None, None, None, Budget(steps=3, seconds=None)),
        (None, 64, None, None, Budget(steps=1, seconds=None)),
        (None, 65, None, None, Budget(steps=2, seconds=None)),
        (None, None, 2.5, None, Budget(steps=None, seconds=2.5)),
        # A step of 64 tokens at 100 FLOPs each costs 6,400.
        (None, None, None, 64_000.0, Budget(steps=10, seconds=None)),
        (None, None, None, 68_000.0, Budget(steps=11, seconds=None)),
        (None, None, None, 1.0, Budget(steps=1, seconds=None)),
    ],
)
def test_a_budget_becomes_whole_steps_or_seconds(
    steps: int | None,
    tokens: int | None,
    seconds: float | None,
    flops: float | None,
    expected: Budget,
) -> None:
    cfg = BudgetConfig(steps, tokens, seconds, flops, default_steps=70)
    assert resolve_budget(cfg, tokens_per_step=64, flops_per_token=100.0) == expected


@pytest.mark.parametrize(
    ("budget", "step", "seconds", "expected"),
    [
        # With a budget in steps each step has its own position; in seconds none is at 0.
        (Budget(steps=60_000, seconds=None), 1, 0.0, 1 / 60_000),
        (Budget(steps=60_000, seconds=None), 2, 99.0, 2 / 60_000),
        (Budget(steps=None, seconds=4.0), 1, 0.0, 1e-3),
        (Budget(steps=None, seconds=4.0), 2, 0.002, 1e-3),
        (Budget(steps=None, seconds=4.0), 3, 3.0, 0.75),
    ],
)
def test_the_first_step_by_the_clock_and_no_other_is_moved_on_the_curve(
    budget: Budget, step: int, seconds: float, expected: float
) -> None:
    assert budget.schedule(step, seconds) == expected


@pytest.mark.parametrize(
    ("progress", "warmup", "final", "expected"),
    [
        (0.0, 0.2, 0.1, 0.0),
        (0.1, 0.2, 0.1, 0.5),
        (0.2, 0.2, 0.1, 1.0),
        # A quarter, a half and three quarters along the cosine: cos is 0.7071, 0 and -0.7071.
        (0.4, 0.2, 0.1, 0.1 + 0.9 * 0.8535533905932737),
        (0.6, 0.2, 0.1, 0.55),
        (0.8, 0.2, 0.1, 0.1 + 0.9 * 0.1464466094067262),
        (1.0, 0.2, 0.1, 0.1),
        (0.5, 0.0, 0.0, 0.5),
        (0.7, 0.0, 1.0, 1.0),
    ],
)
def test_the_learning_rate_warms_up_in_a_line_and_falls_along_a_cosine(
    progress: float, warmup: float, final: float, expected: float
) -> None:
    optim = replace(OPTIM, warmup_fraction=warmup, final_lr_fraction=final)
    assert learning_rate_factor(progress, optim) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(
    ("progress", "fall", "expected"),
    [
        (0.1, 0.4, 0.5),  # half of the warm-up
        (0.2, 0.4, 1.0),
        (0.6, 0.4, 1.0),  # until the last 0.4 of the budget
        (0.7, 0.4, 0.1 + 0.9 * 0.75),
        (0.9, 0.4, 0.1 + 0.9 * 0.25),
        (0.6, None, 0.55),  # halfway from 0.2 to 1
    ],
)
def test_it_can_stay_until_it_falls_along_a_line(
    progress: float, fall: float | None, expected: float
) -> None:
    optim = replace(OPTIM, warmup_fraction=0.2, decay="linear", decay_fraction=fall)
    assert learning_rate_factor(progress, optim) == pytest.approx(expected, abs=1e-15)
