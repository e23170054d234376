"""How long a run trains: steps, tokens, seconds or FLOPs, in one place."""

import math
from dataclasses import dataclass

from gptattn.settings.config import BudgetConfig

FIRST_PROGRESS = 1e-3  # of a budget in seconds


@dataclass(frozen=True)
class Budget:
    """Either `steps` or `seconds` of training time is set; others are turned into steps.

    0 steps train nothing: the model is validated as it is.
    """

    steps: int | None
    seconds: float | None

    def progress(self, step: int, seconds: float) -> float:
        """The share of the budget that is used up, 0 to 1."""
        if self.steps is not None:
            return min(1.0, step / self.steps) if self.steps else 1.0
        assert self.seconds is not None
        return min(1.0, seconds / self.seconds)

    def schedule(self, step: int, seconds: float) -> float:
        """Where on the learning rate's curve this step is: `progress`, but by the clock never 0."""
        progress = self.progress(step, seconds)
        # By the clock the first step comes at 0, and a rate of 0 would waste it.
        return progress if self.seconds is None else max(progress, FIRST_PROGRESS)


def resolve_budget(cfg: BudgetConfig, tokens_per_step: int, flops_per_token: float) -> Budget:
    """The budget asked for, `default_steps` where none is.

    Tokens round up to whole steps, FLOPs (of training, as `cost/flops_per_token` counts them) to
    the nearest, at least one.
    """
    if cfg.seconds is not None:
        return Budget(steps=None, seconds=cfg.seconds)
    if cfg.tokens is not None:
        return Budget(steps=math.ceil(cfg.tokens / tokens_per_step), seconds=None)
    if cfg.flops is not None:
        steps = round(cfg.flops / (tokens_per_step * flops_per_token))
        return Budget(steps=max(1, steps), seconds=None)
    return Budget(steps=cfg.default_steps if cfg.steps is None else cfg.steps, seconds=None)


def learning_rate_factor(progress: float, warmup: float, final: float) -> float:
    """Linear warm-up over the first `warmup` share, then a cosine down to `final`; times the lr.

    Source: Loshchilov and Hutter 2017, arXiv:1608.03983, eq. 5, without restarts.
    """
    if progress < warmup:
        return progress / warmup
    done = (progress - warmup) / (1 - warmup)
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * done))
