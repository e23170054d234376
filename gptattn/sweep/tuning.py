"""`hydra.sweeper.tune`: a first stage finds each variant's learning rate.

It trains every variant at every rate, with a seed of its own, in the subfolder `tuning`. The sweep
then runs each variant at the rate with the lowest final validation loss. Reports leave out the runs
of the first stage.
"""

import math
import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from gptattn.errors import ConfigError
from gptattn.machine.console import make_console
from gptattn.runs.folder import TUNING, RunFolder, find_begun, find_done
from gptattn.settings.identity import settings_key
from gptattn.settings.values import build_dataclass, check_values, within
from gptattn.sweep.jobs import Job
from gptattn.sweep.plan import DIVERGED, Plan
from gptattn.sweep.stages import Results, Stage

FIELD = "hydra.sweeper.tune"
RATE = re.compile(r"\+*optim\.lr=")


@dataclass
class Tune:
    """The rates to try for each variant, and the seed to try them with."""

    lr: list[float]
    seed: int = field(metadata=within(least=0))  # none of those that are compared


def read_tune(node: Mapping[str, Any]) -> Tune:
    """Read `hydra.sweeper.tune`. Raises ConfigError, which names the key."""
    try:
        tune = build_dataclass(Tune, node)
    except ConfigError as error:
        raise ConfigError(f"{FIELD}.{error.field}", error.message) from error
    check_values(tune, f"{FIELD}.")
    if not tune.lr:
        raise ConfigError(f"{FIELD}.lr", "is empty; give one rate or more, as [1e-3,2e-3]")
    for rate in tune.lr:
        if not 0 < rate < math.inf:
            raise ConfigError(f"{FIELD}.lr", f"{rate} is not a positive number; give one above 0")
    return Tune(sorted(set(tune.lr)), tune.seed)


def set_rates(tune: Tune, jobs: Sequence[Job]) -> list[Job]:
    """Return each job at each of the rates. Raises ConfigError if one sets the rate itself."""
    for override in (override for job in jobs for override in job.overrides):
        if RATE.match(override):
            raise ConfigError(
                override.partition("=")[0].lstrip("+"),
                f"cannot be combined with {FIELD}, which chooses it; leave one of them out",
            )
    return [
        Job([*job.overrides, f"optim.lr={rate!r}"], job.variant) for job in jobs for rate in tune.lr
    ]


def make_cell_key(settings: Mapping[str, Any]) -> str:
    """Return a key that is equal for settings that differ only in seed and learning rate."""
    return settings_key({**settings, "seed": 0, "optim": {**settings["optim"], "lr": 1.0}})


def read_cell_and_rate(folder: RunFolder) -> tuple[str, float] | None:
    """Return the cell key and the rate of the run in the folder; None if it is damaged."""
    try:
        settings = folder.read_settings()
        return make_cell_key(settings), float(settings["optim"]["lr"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def tune_stage(
    trials: Sequence[Plan], candidates: Sequence[Plan]
) -> Generator[Stage, Results, tuple[list[Plan], int]]:
    """Run the trials; return the candidates at the best rate of each variant, and an exit code.

    The code is not 0 if a variant diverged at every rate. A variant of which a trial failed
    otherwise is skipped: a rate that is tried later could be better, and it would have runs at two.
    """
    results = yield Stage([*trials], "stage 1 of 2  each variant at each learning rate", False)

    # Loss by rate of each variant; infinite: it diverged, None: unknown.
    losses: dict[str, dict[float, float | None]] = {}
    names: dict[str, str] = {}
    common = set.intersection(*(set(trial.overrides) for trial in trials))
    for trial in sorted(trials, key=lambda trial: trial.cfg.optim.lr):
        loss = None
        if trial.folder in results:
            run = results[trial.folder]
            loss = math.inf if run is None else RunFolder(run).final_loss()
        cell = make_cell_key(asdict(trial.cfg))
        losses.setdefault(cell, {})[trial.cfg.optim.lr] = loss
        own = [o for o in trial.overrides if o not in common and not RATE.match(o)]
        names[cell] = "".join(f"{override} " for override in own)
    best: dict[str, float] = {}
    lines, code = [], 0
    for cell, tried in losses.items():
        known = {rate: loss for rate, loss in tried.items() if loss is not None}
        if len(known) < len(tried):
            lines.append(f"{names[cell]}skipped: not all of its learning rates are known")
        elif min(known.values()) == math.inf:
            lines.append(f"{names[cell]}skipped: it diverged at every learning rate")
            code = DIVERGED
        else:
            best[cell] = min(known, key=lambda rate: (known[rate], rate))
            lines.append(names[cell] + describe_rates(known))
    chosen = [
        one for one in candidates if best.get(make_cell_key(asdict(one.cfg))) == one.cfg.optim.lr
    ]
    if count := mark_replaced(chosen):
        lines.append(
            f"replaced: {count} run{'s' * (count > 1)} at a learning rate that is no longer the "
            "best; reports leave them out"
        )
    make_console().print("\n".join(lines), markup=False, soft_wrap=True)
    return chosen, code


def describe_rates(losses: Mapping[float, float]) -> str:
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


def mark_replaced(chosen: Sequence[Plan]) -> int:
    """Mark finished runs of the plans' variants at other rates, of whatever seed.

    It is for reports to leave them out, once a rate that was added to those of a sweep turns out to
    be better. A rate counts that was tried in the folder of tuning runs; others are the user's own.
    Runs at the plans' rates lose their mark. Return how many runs were marked.
    """
    count = 0
    best = {make_cell_key(asdict(plan.cfg)): plan.cfg.optim.lr for plan in chosen}
    for home in {plan.folder.parent for plan in chosen}:
        tried = {read_cell_and_rate(folder) for folder in find_begun(home / TUNING)}
        for folder in find_done(home):
            found = read_cell_and_rate(folder)
            if found is None or found[0] not in best:
                continue
            cell, rate = found
            if rate == best[cell]:
                folder.replaced_file.unlink(missing_ok=True)
            elif found in tried and not folder.replaced:
                folder.mark_replaced(f"learning rate {best[cell]:g} is better than {rate:g}")
                count += 1
    return count
