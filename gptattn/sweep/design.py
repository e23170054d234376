"""States before a sweep the smallest difference in loss that it can show."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import variance

from gptattn.compare.finished_runs import Run, read_runs
from gptattn.compare.groups import group_runs
from gptattn.compare.sections import SIZES
from gptattn.compare.statistics import smallest_difference
from gptattn.errors import DataError
from gptattn.runs.folder import done_below
from gptattn.settings.config import TrainConfig
from gptattn.settings.identity import budget_words, settings_key
from gptattn.sweep.plan import Plan

# Standard deviation of final losses over seeds, in nats: model=tiny, 1,000 steps, default data.
TYPICAL_DEVIATION = 0.02
FEWEST_DEGREES = 4  # degrees of freedom; with fewer, use TYPICAL_DEVIATION
MOST_READ = 200  # finished runs to read, newest first
ENOUGH_SEEDS = 5  # seeds to suggest for a sweep with one


def design_words(plans: Sequence[Plan], folder: Path) -> list[str]:
    """Return one line per set of comparable runs on the difference that its seeds can show.

    The deviation over seeds comes from finished runs of the same size, data and budget in the
    sweep's folder and its sibling folders; with too few of them it is TYPICAL_DEVIATION.
    """
    sets: dict[str, list[TrainConfig]] = {}
    cfgs = [plan.cfg for plan in plans]
    apart = [word for word in (_block, _precision, _optimizer) if _apart(word, cfgs)]
    for plan in plans:
        key = json.dumps([_comparable(plan.cfg), *(word(plan.cfg) for word in apart)])
        sets.setdefault(key, []).append(plan.cfg)
    finished = _finished(folder)
    # Sets with the same design give the same line: keep one.
    return list(dict.fromkeys(_words(members, finished) for members in sets.values()))


def _comparable(cfg: TrainConfig) -> str:
    """Return a key that is equal for runs whose losses can be compared."""
    settings = asdict(cfg)
    names = ("data", "tokenizer", "budget", "batch_size")
    shared = [settings[name] for name in names]
    size = {name: settings["model"][name] for name in SIZES}
    width = cfg.model.d_mlp if cfg.match == "none" else None  # `match` chooses it per variant
    own = [cfg.validation.fraction, cfg.init_from is not None]
    return json.dumps([*shared, size, width, *own], sort_keys=True)


def _block(cfg: TrainConfig) -> str:
    return json.dumps([asdict(cfg.block), cfg.model.mlp])


def _precision(cfg: TrainConfig) -> str:
    return cfg.trainer.precision


def _optimizer(cfg: TrainConfig) -> str:
    return json.dumps(cfg.optim.matrices, sort_keys=True)


def _apart(word: Callable[[TrainConfig], str], cfgs: Sequence[TrainConfig]) -> bool:
    """Whether runs of another word are not compared: as in the report, if each has variants."""
    variants: dict[str, set[str]] = {}
    for cfg in cfgs:
        variants.setdefault(word(cfg), set()).add(cfg.variant)
    return all(len(own) > 1 for own in variants.values())


def _words(cfgs: Sequence[TrainConfig], finished: Sequence[Run]) -> str:
    seeds: dict[str, set[int]] = {}
    for cfg in cfgs:
        key = settings_key(asdict(replace(cfg, seed=0, init_from=None)))
        seeds.setdefault(key, set()).add(cfg.seed)
    n, comparisons = len(set.intersection(*seeds.values())), len(seeds) - 1
    if not comparisons:
        return "one variant: nothing to compare"
    deviation, source = _deviation(cfgs[0], finished)
    # Two variants at one seed are nearly independent runs.
    paired = math.sqrt(2) * deviation
    design = f"{n} seed{'s' * (n != 1)}, {comparisons} comparison{'s' * (comparisons > 1)}"
    if n > 1:
        found = smallest_difference(paired, n, comparisons)
        return (
            f"{design}: differences of about {found:.2g} nats or more would be shown with "
            f"80% power, {source}"
        )
    found = smallest_difference(paired, ENOUGH_SEEDS, comparisons)
    more = ",".join(str(seed) for seed in range(1, ENOUGH_SEEDS + 1))
    return (
        f"{design}: no difference can be shown, however large; seed={more} would show those of "
        f"about {found:.2g} nats or more with 80% power, {source}"
    )


def _deviation(cfg: TrainConfig, finished: Sequence[Run]) -> tuple[float, str]:
    """Return the standard deviation of final losses over seeds, and its source in words."""
    groups = group_runs([run for run in finished if _similar(run, cfg)]).values()
    spread = [[run.metrics["val/loss"] for run in members] for members in groups]
    spread = [losses for losses in spread if len(losses) > 1]
    degrees = sum(len(losses) - 1 for losses in spread)
    if degrees < FEWEST_DEGREES:
        return TYPICAL_DEVIATION, (
            f"if losses vary over seeds as at model=tiny after 1,000 steps (standard deviation "
            f"{TYPICAL_DEVIATION:g} nats)"
        )
    pooled = sum((len(losses) - 1) * variance(losses) for losses in spread) / degrees
    deviation = math.sqrt(pooled)
    runs = sum(map(len, spread))
    return (
        deviation,
        f"judging by {runs} finished runs like these (standard deviation {deviation:.2g} nats)",
    )


def _similar(run: Run, cfg: TrainConfig) -> bool:
    """Whether the run has the same size, data and budget as `cfg`; its attention may differ."""
    settings = asdict(cfg)
    model = {f"model.{key}": str(value) for key, value in settings["model"].items()}
    flat = {f"budget.{key}": str(value) for key, value in settings["budget"].items()}
    # `match` changes the width of the MLP; recomputing changes no number, and is no setting of it.
    del model["model.d_mlp"], model["model.recompute"]
    block = {f"block.{key}": str(value) for key, value in settings["block"].items()}
    return (
        run.budget == budget_words(flat)
        and run.places.get("data.path", "None") == str(cfg.data.get("path"))
        and run.settings.get("batch_size") == str(cfg.batch_size)
        and all(run.settings.get(key) == value for key, value in (model | block).items())
        and all(run.choices.get(key) == cfg.choices[key] for key in ("data", "tokenizer"))
    )


def _finished(folder: Path) -> list[Run]:
    """Return the newest finished runs in the folder and its sibling folders."""
    there = {*done_below(folder), *done_below(folder.parent, levels=2)}
    newest = sorted(there, key=lambda run: run.done_at)[-MOST_READ:]
    try:
        return read_runs([run.path for run in newest])[0] if newest else []
    except DataError:
        return []
