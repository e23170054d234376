"""The stages of a sweep that trains each variant at its own best learning rate.

The first stage trains every variant at every rate, with a seed of its own, in the subfolder
`tuning`; the second trains each variant with the seeds to compare, at the rate with the lowest
final validation loss. Reports leave the runs of the first stage out.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from gptattn.errors import ConfigError
from gptattn.runs.folder import TUNING, RunFolder
from gptattn.settings.values import check_choice
from gptattn.sweep.checks import checked
from gptattn.sweep.plan import Plan
from gptattn.sweep.replaced import cell_of
from gptattn.sweep.stages import DIVERGED_EVERYWHERE, Chosen, Stages

FIELD = "hydra.sweeper.tune"
SEED, RATE = re.compile(r"\+*seed="), re.compile(r"\+*optim\.lr=")


@dataclass(frozen=True)
class Tune:
    """The rates to try for each variant, and the seed to try them with."""

    lr: Sequence[float]
    seed: int  # none of those that are compared


def tune_of(node: Mapping[str, Any]) -> Tune:
    """Read `hydra.sweeper.tune`. Raises ConfigError, which names the key."""
    names = [field.name for field in fields(Tune)]
    for name in node:
        check_choice(f"{FIELD} key", str(name), names)
    for name in names:
        if node.get(name) is None:
            raise ConfigError(f"{FIELD}.{name}", "is missing; give a value")
    rates, seed = node["lr"], node["seed"]
    if isinstance(rates, str | int | float) or not rates:
        raise ConfigError(
            f"{FIELD}.lr", f"{rates} is not a list of rates; give one, as [1e-3,2e-3]"
        )
    for rate in rates:
        if type(rate) not in (int, float) or not math.isfinite(rate) or rate <= 0:
            raise ConfigError(f"{FIELD}.lr", f"{rate!r} is not a positive number; give one above 0")
    if len(set(rates)) < len(rates):
        raise ConfigError(f"{FIELD}.lr", f"{rates} has a rate twice; give each once")
    if type(seed) is not int or seed < 0:
        raise ConfigError(f"{FIELD}.seed", f"{seed!r} is not a seed; give a whole number from 0")
    return Tune(sorted(map(float, rates)), seed)


def at_rates(tune: Tune, jobs: Sequence[list[str]]) -> tuple[list[list[str]], list[list[str]]]:
    """Return the overrides of both stages' runs: to tune, and to compare at any of the rates.

    Raises ConfigError if a job sets the rate itself.
    """
    for override in (override for job in jobs for override in job):
        if RATE.match(override):
            raise ConfigError(
                override.partition("=")[0].lstrip("+"),
                f"has no place beside {FIELD}, which chooses the learning rate; leave one out",
            )
    seedless = {tuple(o for o in job if not SEED.match(o)): None for job in jobs}
    rates = [f"optim.lr={rate!r}" for rate in tune.lr]
    return (
        [[*job, f"seed={tune.seed}", rate] for job in seedless for rate in rates],
        [[*job, rate] for job in jobs for rate in rates],
    )


def to_tune(plan: Plan) -> Plan:
    """Return the plan of a tuning run in the folder of such runs."""
    return replace(plan, folder=plan.folder.parent / TUNING / plan.folder.name)


@dataclass(frozen=True)
class Rate:
    """A tuning run, and how it ended."""

    plan: Plan
    loss: float | None  # None: not done; infinite: diverged

    @property
    def lr(self) -> float:
        """The rate."""
        return self.plan.cfg.optim.lr


class TuneStage:
    """The second stage: `plans` are its runs at every rate, of which one rate each is chosen.

    Of these, checked, only those count that `among` returns.
    """

    titles = ("each variant at each learning rate", "each variant at its best learning rate")
    first_counts = False
    lost = "whose learning rate is not known yet"

    def __init__(
        self,
        tune: Tune,
        plans: Sequence[Plan],
        among: Callable[[list[Plan]], list[Plan]] = list,
    ) -> None:
        """Raises ConfigError if the tuning seed is among those that are compared."""
        if tune.seed in {plan.cfg.seed for plan in plans}:
            raise ConfigError(
                f"{FIELD}.seed", f"{tune.seed} is one of the seeds to compare; give another"
            )
        self._plans, self._among = plans, among

    def candidates(self, first: Sequence[Plan], made: Mapping[Path, Path]) -> list[Plan]:
        """Return the checked plans of every variant and seed at every rate."""
        return self._among(checked(self._plans))

    def expected(self, stages: Stages) -> list[Plan]:
        """Choose the best rate where it is known, elsewhere the lowest in its place."""
        found = _tried(stages)
        lr = {cell: (_best(tried) or tried[0]).lr for cell, tried in found.items()}
        return [plan for plan in stages.candidates if plan.cfg.optim.lr == lr[_cell(plan)]]

    def chosen(self, stages: Stages) -> Chosen:
        """Choose the best rate of each variant; variants without one are skipped."""
        common = set.intersection(*(set(plan.overrides) for plan in stages.first))
        best, chosen = {}, Chosen([])
        for cell, tried in _tried(stages).items():
            best[cell] = _best(tried)
            own = [o for o in tried[0].plan.overrides if o not in common and not RATE.match(o)]
            if best[cell] is not None:
                words = rate_words({one.lr: one.loss for one in tried if one.loss is not None})
                chosen.lines.append(" ".join([*own, words]))
            else:
                reason = _no_rate(tried)
                skipped = [plan for plan in stages.second if _cell(plan) == cell]
                chosen.skipped.update({plan.folder: reason for plan in skipped})
                chosen.diverged += reason == DIVERGED_EVERYWHERE
        for plan in stages.candidates:
            rate = best[_cell(plan)]
            if rate is not None and plan.cfg.optim.lr == rate.lr:
                chosen.plans.append(plan)
        return chosen


def _tried(stages: Stages) -> dict[str, list[Rate]]:
    """Return what the tuning runs of each variant gave, the lowest rate first."""
    found: dict[str, list[Rate]] = {}
    made = stages.made
    for plan in sorted(stages.first, key=lambda plan: plan.cfg.optim.lr):
        loss = math.inf if plan.folder in stages.lost else None
        if plan.folder in made:
            loss = RunFolder(made[plan.folder]).final_loss()
        found.setdefault(_cell(plan), []).append(Rate(plan, loss))
    return found


def _cell(plan: Plan) -> str:
    """Return a key that is equal for runs that differ only in seed and rate."""
    return cell_of(asdict(plan.cfg))


def _best(tried: Sequence[Rate]) -> Rate | None:
    """Return the rate with the lowest loss, of equals the lowest; None while one is to be tried.

    Otherwise a rate tried later could be better, and one variant would have runs at two.
    """
    losses = [one.loss for one in tried if one.loss is not None]
    if len(losses) < len(tried) or min(losses) == math.inf:
        return None
    return tried[losses.index(min(losses))]


def _no_rate(tried: Sequence[Rate]) -> str:
    missing = [one.plan for one in tried if one.loss is None]
    if missing:
        return f"its learning rate is not known: {missing[0].folder.name} is not done"
    return DIVERGED_EVERYWHERE


def rate_words(losses: Mapping[float, float]) -> str:
    """Return `0.002 is best (0.001: 1.6200, 0.002: 1.6000, 0.004: diverged)`, from loss by rate.

    Says so if the best is the lowest or the highest of several.
    """
    best = min(losses, key=lambda rate: (losses[rate], rate))
    each = ", ".join(
        f"{rate:g}: {f'{loss:.4f}' if math.isfinite(loss) else 'diverged'}"
        for rate, loss in sorted(losses.items())
    )
    words = f"{best:g} is best ({each})"
    if len(losses) > 1 and best in (min(losses), max(losses)):
        side = ("lowest", "below") if best == min(losses) else ("highest", "above")
        words += f", the {side[0]} that was tried: a better one may lie {side[1]}"
    return words
