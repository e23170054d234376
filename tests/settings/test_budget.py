"""The budget and the learning-rate schedule, against values worked by hand."""

from dataclasses import replace

import pytest
from building import settings

from gptattn.settings.budget import Budget, learning_rate, limit_validation, resolve_budget
from gptattn.settings.config import BudgetConfig


@pytest.mark.parametrize(
    ("given", "steps"),
    [
        ({}, 70),
        ({"steps": 3}, 3),
        ({"tokens": 64}, 1),
        ({"tokens": 65}, 2),
        ({"seconds": 2.5}, None),
        # A step of 64 tokens at 100 FLOPs each costs 6,400.
        ({"flops": 64_000.0}, 10),
        ({"flops": 68_000.0}, 11),
        ({"flops": 1.0}, 1),
    ],
)
def test_a_budget_becomes_whole_steps_or_seconds(given, steps):
    unset = {"steps": None, "tokens": None, "seconds": None, "flops": None, "accuracy": None}
    cfg = BudgetConfig(**(unset | given), default_steps=70)
    expected = Budget(steps, given.get("seconds"))
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
    budget, step, seconds, expected
):
    assert budget.schedule(step, seconds) == expected


@pytest.mark.parametrize(
    ("progress", "warmup", "final", "decay", "fall", "expected"),
    [
        (0.0, 0.2, 0.1, "cosine", None, 0.0),
        (0.1, 0.2, 0.1, "cosine", None, 0.5),
        (0.2, 0.2, 0.1, "cosine", None, 1.0),
        # A quarter, a half and three quarters along the cosine: cos is 0.7071, 0 and -0.7071.
        (0.4, 0.2, 0.1, "cosine", None, 0.1 + 0.9 * 0.8535533905932737),
        (0.6, 0.2, 0.1, "cosine", None, 0.55),
        (0.8, 0.2, 0.1, "cosine", None, 0.1 + 0.9 * 0.1464466094067262),
        (1.0, 0.2, 0.1, "cosine", None, 0.1),
        (0.1, 0.2, 0.1, "linear", 0.4, 0.5),  # half of the warm-up
        (0.2, 0.2, 0.1, "linear", 0.4, 1.0),
        (0.6, 0.2, 0.1, "linear", 0.4, 1.0),  # until the last 0.4 of the budget
        (0.7, 0.2, 0.1, "linear", 0.4, 0.1 + 0.9 * 0.75),
        (0.9, 0.2, 0.1, "linear", 0.4, 0.1 + 0.9 * 0.25),
        (0.6, 0.2, 0.1, "linear", None, 0.55),  # halfway from 0.2 to 1
    ],
)
def test_the_learning_rate_warms_up_linearly_and_decays_by_cosine_or_line(
    progress, warmup, final, decay, fall, expected
):
    curve = {"warmup_fraction": warmup, "final_lr_fraction": final, "decay": decay}
    optim = replace(settings().optim, **curve, decay_fraction=fall)
    assert learning_rate(progress, optim) == pytest.approx(optim.lr * expected, abs=1e-15)


@pytest.mark.parametrize(
    ("given", "most"),
    [
        # GPT-2 small takes 2 * 84,934,656 FLOPs per token forward: 2.5e12 are enough for 14,717.
        (["model=gpt2_small", "batch_size=1", "budget.steps=5"], 14_717),
        (["model=gpt2_small", "batch_size=2", "budget.steps=100"], 40_960),  # a fifth of 204,800
        (["model=gpt2_small", "batch_size=2", "budget.tokens=204700"], 40_960),
        (["model=gpt2_small", "budget.steps=5", "validation.tokens=null"], None),
        (["model=gpt2_small", "budget.seconds=5", "validation.tokens=7"], 7),
        (["model=gpt2_small", "budget.seconds=5"], None),
        (["budget.steps=1", "attn=mla"], 12_715_658),  # 2 * 98,304: more than held-out texts have
    ],
)
def test_a_large_model_with_few_steps_scores_part_of_the_held_out_text(given, most):
    assert limit_validation(settings(*given)) == most
