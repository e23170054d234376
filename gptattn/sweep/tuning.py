"""The stages of a sweep that trains each variant at its own best learning rate.

The first stage trains every variant at every rate, with a seed of its own, in the subfolder
`tuning`; the second trains each variant with the seeds to compare, at the rate with the lowest
final validation loss. Reports leave the runs of the first stage out.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from gptattn.errors import ConfigError, NumericError
from gptattn.machine.console import make_console
from gptattn.runs.folder import TUNING, RunFolder
from gptattn.settings.values import check_choice
from gptattn.sweep.jobs import Jobs
from gptattn.sweep.plan import Plan
from gptattn.sweep.replaced import cell_of, mark_replaced
from gptattn.sweep.stages import Among, PlanJobs, Stage, Stages

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


def tune_stages(node: Mapping[str, Any], jobs: Jobs, plan: PlanJobs, among: Among = list) -> Stages:
    """Train each variant at each rate, then those to compare at the best rate of each.

    Of the second stage's plans only those count that `among` returns. Raises ConfigError if the
    tuning seed is among those that are compared.
    """
    tune = tune_of(node)
    both = {variant: at_rates(tune, own) for variant, own in jobs.items()}
    first = [
        replace(one, folder=one.folder.parent / TUNING / one.folder.name)
        for one in plan({variant: own for variant, (own, _) in both.items()})
    ]
    candidates = among(plan({variant: own for variant, (_, own) in both.items()}))
    if tune.seed in {one.cfg.seed for one in candidates}:
        raise ConfigError(
            f"{FIELD}.seed", f"{tune.seed} is one of the seeds to compare; give another"
        )
    results = yield Stage(first, "stage 1 of 2  each variant at each learning rate", counts=False)

    # Loss by rate of each variant; infinite: it diverged, None: it is not known.
    losses: dict[str, dict[float, float | None]] = {}
    named: dict[str, Plan] = {}
    for one in sorted(first, key=lambda one: one.cfg.optim.lr):
        loss = math.inf if one.folder in results.diverged else None
        if one.folder in results.done:
            loss = RunFolder(results.done[one.folder]).final_loss()
        cell = cell_of(asdict(one.cfg))
        losses.setdefault(cell, {})[one.cfg.optim.lr] = loss
        named.setdefault(cell, one)
    common = set.intersection(*(set(one.overrides) for one in first))
    best: dict[str, float] = {}
    lines, codes = [], []
    for cell, tried in losses.items():
        own = [o for o in named[cell].overrides if o not in common and not RATE.match(o)]
        known = {rate: loss for rate, loss in tried.items() if loss is not None}
        if len(known) < len(tried):
            # A rate tried later could be better, and one variant would have runs at two.
            lines.append(" ".join([*own, "skipped: not all of its learning rates are known"]))
        elif min(known.values()) == math.inf:
            lines.append(" ".join([*own, "skipped: it diverged at every learning rate"]))
            codes.append(NumericError.exit_code)
        else:
            best[cell] = min(known, key=lambda rate: (known[rate], rate))
            lines.append(" ".join([*own, rate_words(known)]))
    chosen = [one for one in candidates if best.get(cell_of(asdict(one.cfg))) == one.cfg.optim.lr]
    if count := mark_replaced(chosen):
        lines.append(
            f"replaced: {count} run{'s' * (count > 1)} at a learning rate that is no longer the "
            "best; reports leave them out"
        )
    if chosen:
        title = "stage 2 of 2  each variant at its best learning rate"
        yield Stage(chosen, title, lines=lines)
    elif lines:
        make_console().print("\n".join(lines), markup=False, soft_wrap=True)
    return codes


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
