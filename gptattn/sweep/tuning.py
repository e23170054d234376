"""`hydra.sweeper.tune`: a first stage finds each variant's learning rate.

It trains every variant at every rate, with a separate seed, in the subfolder `tuning`; `budget` is
the share of a run's budget that each trial gets. The sweep then runs each variant at the rate with
the lowest final validation loss. With `refine`, it first tries further rates if the best is the
lowest or the highest, and takes the vertex of a parabola through the best rate and its neighbours.
Runs use `scale` times that rate, since longer runs need lower rates. Reports leave out the trials.
"""

import math
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Meta
from omegaconf import DictConfig, OmegaConf

from gptattn.errors import DAMAGE, ConfigError
from gptattn.runs.folder import TUNING, RunFolder, find_begun
from gptattn.settings.config import Positive, Share
from gptattn.settings.identity import settings_key
from gptattn.settings.values import build_dataclass
from gptattn.sweep.jobs import Job
from gptattn.sweep.plan import DIVERGED, Plan
from gptattn.sweep.stages import Results, Stage

FIELD = "hydra.sweeper.tune"
RATE = re.compile(r"\+*optim\.lr=")
SEED, BUDGET = re.compile(r"\+*seed="), re.compile(r"\+*budget\.(?!accuracy)\w+=")
MAX_RATES = 10  # per variant, including those that `refine` adds


@dataclass
class Tune:
    """The rates to try for each variant, and the seed to try them with."""

    lr: list[Positive]
    seed: Annotated[int, Meta(ge=0)]  # not one of those compared
    budget: Annotated[float, Meta(ge=0.01, le=1)] = 1.0  # share of a run's budget
    refine: bool = False
    scale: Share = 1.0  # a run's rate over the rate that its trials chose


def read_tune(node: Mapping[str, Any]) -> Tune:
    """Read `hydra.sweeper.tune`. Raises ConfigError, which names the key."""
    given = OmegaConf.to_container(node) if isinstance(node, DictConfig) else node
    tune = build_dataclass(Tune, given, f"{FIELD}.")
    if not tune.lr:
        raise ConfigError(f"{FIELD}.lr", "is empty; give one or more rates, such as [1e-3,2e-3]")
    return replace(tune, lr=sorted(set(tune.lr)))


def set_rate(jobs: Sequence[Job], rate: float) -> list[Job]:
    """Return the jobs at this rate. Raises ConfigError if one sets the rate itself."""
    for override in (override for job in jobs for override in job.overrides):
        if RATE.match(override):
            raise ConfigError(
                override.partition("=")[0].lstrip("+"),
                f"cannot be combined with {FIELD}, which chooses it; leave one out",
            )
    return [Job([*job.overrides, f"optim.lr={rate!r}"], job.variant) for job in jobs]


def shrink(budget: Mapping[str, Any], share: float) -> dict[str, Any]:
    """Return this share of a budget, in any unit; steps and tokens stay whole."""
    return {
        unit: max(1, round(value * share)) if isinstance(value, int) else value * share
        for unit, value in budget.items()
        if value is not None and unit != "accuracy"
    }


def make_cell_key(settings: Mapping[str, Any], share: float = 1.0) -> str:
    """Return a key that is the same for settings that differ only in seed and learning rate.

    With a `share`, it is the key of their trials, which have this share of the budget.
    """
    own = {"seed": 0, "optim": {**settings["optim"], "lr": 1.0}}
    own["budget"] = {**settings["budget"], **shrink(settings["budget"], share)}
    return settings_key({**settings, **own})


def tune_stage(
    tune: Tune, plans: Sequence[Plan], plan: Callable[[Sequence[Job], Path], list[Plan]], home: Path
) -> Generator[Stage, Results, tuple[list[Plan], int]]:
    """Run the trials; return the plans at the best rate of each variant, and an exit code.

    The code is not 0 if a variant diverged at every rate. A variant with a trial that failed for
    another reason is skipped: that rate could later prove better, leaving runs at two rates.
    Raises ConfigError if the trials' seed is one of the plans' seeds.
    """
    if tune.seed in {one.cfg.seed for one in plans}:
        raise ConfigError(
            f"{FIELD}.seed", f"{tune.seed} is one of the seeds to compare; use another"
        )
    own: dict[str, list[str]] = {}  # the overrides of each variant's trials, without their rates
    for one in plans:
        cell = make_cell_key(asdict(one.cfg), tune.budget)
        own[cell] = [o for o in one.overrides if not (RATE.match(o) or SEED.match(o))]
        if tune.budget < 1:
            spent = shrink(asdict(one.cfg.budget), tune.budget)
            own[cell] = [o for o in own[cell] if not BUDGET.match(o)]
            own[cell] += [f"budget.{unit}={value}" for unit, value in spent.items()]
        own[cell].append(f"seed={tune.seed}")
    common = set.intersection(*map(set, own.values()))

    # Loss by rate of each variant; infinite: it diverged, None: unknown.
    losses: dict[str, dict[float, float | None]] = {cell: {} for cell in own}
    due: dict[str, list[float]] = dict.fromkeys(own, tune.lr)
    title = "stage 1  each variant at each learning rate"
    while due:
        wanted = [Job([*own[c], f"optim.lr={r!r}"]) for c, rates in due.items() for r in rates]
        trials = plan(wanted, home / TUNING)
        results = yield Stage([*trials], title, False)
        for trial in trials:
            loss = None
            if trial.folder in results:
                run = results[trial.folder]
                loss = math.inf if run is None else RunFolder(run).final_loss()
            losses[make_cell_key(asdict(trial.cfg))][trial.cfg.optim.lr] = loss
        further = {cell: next_rate(losses[cell]) for cell in due} if tune.refine else {}
        due = {cell: [rate] for cell, rate in further.items() if rate is not None}
        title = "stage 1, extended  the best rate was the lowest or the highest"

    best: dict[str, float] = {}
    lines, code = [], 0
    for cell, tried in losses.items():
        name = "".join(f"{override} " for override in own[cell] if override not in common)
        finished = {rate: loss for rate, loss in tried.items() if loss is not None}
        if len(finished) < len(tried):
            lines.append(f"{name}skipped: some trials have no result")
        elif min(finished.values()) == math.inf:
            lines.append(f"{name}skipped: it diverged at every learning rate")
            code = DIVERGED
        else:
            rate = find_vertex(finished) if tune.refine else find_best(finished)
            best[cell] = float(f"{rate * tune.scale:.3g}") if tune.scale < 1 else rate
            used = f"; runs use {best[cell]:g}" * (best[cell] != find_best(finished))
            lines.append(name + describe_rates(finished) + used)
    chosen = [
        Job([*(o for o in one.overrides if not RATE.match(o)), f"optim.lr={best[cell]!r}"])
        for one in plans
        if (cell := make_cell_key(asdict(one.cfg), tune.budget)) in best
    ]
    final = plan(chosen, home) if chosen else []
    if count := mark_replaced(final):
        lines.append(
            f"replaced: {count} run{'s' * (count > 1)} at a learning rate that is no longer the "
            "best; reports leave them out"
        )
    print("\n".join(lines), flush=True)
    return final, code


def find_best(losses: Mapping[float, float]) -> float:
    """Return the rate with the lowest loss, on a tie the lowest rate."""
    return min(losses, key=lambda rate: (losses[rate], rate))


def find_vertex(losses: Mapping[float, float]) -> float:
    """Return the lowest point of a parabola through the best rate and its neighbours.

    The parabola is over the logarithm of the rate; the result has three digits. It is the best rate
    itself if that lacks a neighbour, or a neighbour diverged.
    """
    rates, best = sorted(losses), find_best(losses)
    i = rates.index(best)
    around = rates[i - 1 : i + 2] if i else []
    if len(around) < 3 or not all(math.isfinite(losses[rate]) for rate in around):
        return best
    bend, slope, _ = np.polyfit(np.log(around), [losses[rate] for rate in around], 2)
    vertex = math.exp(-slope / (2 * bend)) if bend > 0 else best  # losses can be almost equal
    return float(f"{min(max(vertex, around[0]), around[2]):.3g}")


def next_rate(losses: Mapping[float, float | None]) -> float | None:
    """Return the next rate to try if the best of two or more is the lowest or highest, or None."""
    rates = sorted(losses)
    finished = {rate: loss for rate, loss in losses.items() if loss is not None}
    if len(finished) < len(rates) or not 2 <= len(rates) < MAX_RATES:
        return None
    if min(finished.values()) == math.inf:
        return None
    best = find_best(finished)
    if best == rates[0]:
        return float(f"{rates[0] ** 2 / rates[1]:.6g}")
    return float(f"{rates[-1] ** 2 / rates[-2]:.6g}") if best == rates[-1] else None


def describe_rates(losses: Mapping[float, float]) -> str:
    """Return `0.002 is best (0.001: 1.6200, 0.002: 1.6000, 0.004: diverged)` from loss by rate."""
    best = find_best(losses)
    each = ", ".join(
        f"{rate:g}: {f'{loss:.4f}' if math.isfinite(loss) else 'diverged'}"
        for rate, loss in sorted(losses.items())
    )
    at_edge = len(losses) > 1 and best in (min(losses), max(losses))
    hint = ", the lowest or highest tried: a better one may lie beyond" * at_edge
    return f"{best:g} is best ({each}){hint}"


def mark_replaced(chosen: Sequence[Plan]) -> int:
    """Mark finished runs of the plans' variants at other rates, whatever their seed.

    Reports leave them out: a rate added to a sweep can turn out to be better. Runs at the plans'
    rates lose their mark. Return how many runs were marked.
    """
    count = 0
    best = {make_cell_key(asdict(plan.cfg)): plan.cfg.optim.lr for plan in chosen}
    homes = {plan.folder.parent for plan in chosen}
    for folder in [run for home in homes for run in find_begun(home) if run.done]:
        try:
            settings = folder.read_settings()
            cell, rate = make_cell_key(settings), float(settings["optim"]["lr"])
        except DAMAGE:
            continue
        if rate == best.get(cell):
            folder.replaced_file.unlink(missing_ok=True)
        elif cell in best and not folder.replaced:
            folder.mark_replaced(f"its variant is now trained at {best[cell]:g}, not {rate:g}")
            count += 1
    return count
