"""How long a run trains (steps, tokens, seconds or FLOPs), and its learning-rate schedule."""

import math
from dataclasses import dataclass

from gptattn.settings.config import BudgetConfig, OptimConfig, TrainConfig

VALIDATION_FLOPS = 2.5e12  # allowed for any validation: half a minute on two CPU cores
FIRST_PROGRESS = 1e-3  # lowest position on the schedule with a budget in seconds


@dataclass(frozen=True)
class Budget:
    """A training budget: either optimizer `steps` or `seconds` of training time; the other is None.

    `resolve_budget` converts tokens and FLOPs to steps. With 0 steps the model is only validated.
    """

    steps: int | None
    seconds: float | None

    def progress(self, step: int, seconds: float) -> float:
        """Return the fraction of the budget used after `step` steps and `seconds`, 0 to 1."""
        if self.steps is not None:
            return min(1.0, step / self.steps) if self.steps else 1.0
        assert self.seconds is not None
        return min(1.0, seconds / self.seconds)

    def schedule(self, step: int, seconds: float) -> float:
        """Return the position of this step on the learning-rate schedule, 0 to 1.

        It equals `progress`, except that a budget in seconds starts at `FIRST_PROGRESS`.
        """
        progress = self.progress(step, seconds)
        # A budget in seconds takes its first step at second 0, which warm-up would waste at rate 0.
        return progress if self.seconds is None else max(progress, FIRST_PROGRESS)


def resolve_budget(cfg: BudgetConfig, tokens_per_step: int, flops_per_token: float) -> Budget:
    """Return the requested budget, or `default_steps` if none is set.

    Tokens are rounded up to whole steps. Training FLOPs, counted as in `cost/flops_per_token`,
    are rounded to the nearest step, at least one.
    """
    if cfg.seconds is not None:
        return Budget(steps=None, seconds=cfg.seconds)
    if cfg.tokens is not None:
        return Budget(steps=math.ceil(cfg.tokens / tokens_per_step), seconds=None)
    if cfg.flops is not None:
        steps = round(cfg.flops / (tokens_per_step * flops_per_token))
        return Budget(steps=max(1, steps), seconds=None)
    return Budget(steps=cfg.default_steps if cfg.steps is None else cfg.steps, seconds=None)


def limit_validation(cfg: TrainConfig) -> int | None:
    """Return the most held-out tokens that a validation scores; None: all.

    `auto`: a fifth of the tokens that the run trains on, or as many as VALIDATION_FLOPS allow if
    that is more. The FLOPs are those of GPT-2's blocks, so every attention gets the same limit.
    """
    if cfg.validation.tokens != "auto":
        return cfg.validation.tokens
    forward = 24 * cfg.model.num_layers * cfg.model.d_model**2  # FLOPs per token
    tokens_per_step = cfg.batch_size * cfg.model.context_length
    steps = resolve_budget(cfg.budget, tokens_per_step, 3 * forward).steps
    if not steps:
        return None
    return max(tokens_per_step * steps // 5, round(VALIDATION_FLOPS / forward))


def learning_rate(progress: float, optim: OptimConfig) -> float:
    """Return the learning rate at `progress`, 0 to 1; see `Budget.schedule`.

    It rises linearly to the peak, `lr`, over the first `warmup_fraction`, holds, and falls to
    `final_lr_fraction` of the peak over the last `decay_fraction`, along a cosine or a line.
    Source: Loshchilov and Hutter 2017, arXiv:1608.03983, eq. 5, without restarts; for the line,
    Bergsma et al. 2025, arXiv:2502.15938.
    """
    warmup, final = optim.warmup_fraction, optim.final_lr_fraction
    if progress < warmup:
        return optim.lr * (progress / warmup)
    start = warmup if optim.decay_fraction is None else 1 - optim.decay_fraction
    done = max(0.0, (progress - start) / (1 - start))
    left = 1 - done if optim.decay == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return optim.lr * (final + (1 - final) * left)
