"""The smallest difference in loss that a sweep can show, stated before it starts."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from statistics import variance

from gptattn.compare.finished_runs import Run, read_runs
from gptattn.compare.statistics import smallest_difference
from gptattn.errors import DataError
from gptattn.runs.folder import find_done
from gptattn.settings.config import OF_BLOCK, TrainConfig
from gptattn.settings.identity import flat, result_settings, settings_key
from gptattn.sweep.plan import Plan

# Standard deviation of final losses over seeds, in nats: model=tiny, 1,000 steps, default data.
TYPICAL_DEVIATION = 0.02
MIN_DEGREES = 4  # degrees of freedom; with fewer, use TYPICAL_DEVIATION
MAX_READ = 200  # finished runs to read, newest first
ENOUGH_SEEDS = 5  # seeds to suggest for a sweep with one

# Losses can be compared between runs that agree in these, and in the model's size.
SHARED = ("data.", "tokenizer.", "budget", "batch_size", "validation.")
SIZES = ("model.num_layers", "model.d_model", "model.context_length", "model.vocab_size")
# As in the report, these part runs only where each has several variants.
APART = (OF_BLOCK, ("trainer.precision",), ("optim.matrices",))


def describe_design(plans: Sequence[Plan], folder: Path) -> list[str]:
    """Return one line per set of comparable runs on the difference that its seeds can show.

    The deviation over seeds comes from finished runs of the same size, data and budget in the
    sweep's folder and its sibling folders; with too few of them it is TYPICAL_DEVIATION.
    """
    cfgs = [plan.cfg for plan in plans]
    keys = SHARED + SIZES
    for names in APART:
        variants: dict[str, set[str]] = {}
        for cfg in cfgs:
            variants.setdefault(_select_settings(cfg, names), set()).add(cfg.variant)
        if all(len(own) > 1 for own in variants.values()):
            keys += names
    sets: dict[str, list[TrainConfig]] = {}
    for cfg in cfgs:
        width = () if cfg.match != "none" else ("model.d_mlp",)  # `match` chooses it per variant
        key = _select_settings(cfg, keys + width) + str(cfg.init_from is None)
        sets.setdefault(key, []).append(cfg)
    there = {*find_done(folder), *find_done(folder.parent, levels=2)}
    newest = sorted(there, key=lambda run: run.done_at)[-MAX_READ:]
    finished: list[Run] = []
    with suppress(DataError):  # there is none
        finished = read_runs([run.path for run in newest])[0]
    # Sets with the same design give the same line: keep one.
    return list(dict.fromkeys(_describe_set(members, finished) for members in sets.values()))


def _select_settings(cfg: TrainConfig, keys: tuple[str, ...]) -> str:
    """Return the settings whose names begin with one of these keys."""
    settings = result_settings(flat(asdict(cfg)))
    return str(sorted((key, value) for key, value in settings.items() if key.startswith(keys)))


def _describe_set(cfgs: Sequence[TrainConfig], finished: Sequence[Run]) -> str:
    seeds: dict[str, set[int]] = {}
    for cfg in cfgs:
        key = settings_key({**asdict(cfg), "seed": 0, "init_from": None})
        seeds.setdefault(key, set()).add(cfg.seed)
    n, comparisons = len(set.intersection(*seeds.values())), len(seeds) - 1
    if not comparisons:
        return "one variant: nothing to compare"
    deviation, source = _estimate_deviation(cfgs[0], finished)
    # Two variants at one seed are nearly independent runs.
    found = smallest_difference(math.sqrt(2) * deviation, n if n > 1 else ENOUGH_SEEDS, comparisons)
    design = f"{n} seed{'s' * (n != 1)}, {comparisons} comparison{'s' * (comparisons > 1)}"
    if n > 1:
        return (
            f"{design}: differences of about {found:.2g} nats or more would be shown with "
            f"80% power, {source}"
        )
    more = ",".join(str(seed) for seed in range(1, ENOUGH_SEEDS + 1))
    return (
        f"{design}: no difference can be shown, however large; seed={more} would show those of "
        f"about {found:.2g} nats or more with 80% power, {source}"
    )


def _estimate_deviation(cfg: TrainConfig, finished: Sequence[Run]) -> tuple[float, str]:
    """Return the standard deviation of final losses over seeds, and its source in words."""
    similar = [run for run in finished if _is_similar(run, cfg)]
    spread: list[list[float]] = []
    if len(similar) > MIN_DEGREES:
        from gptattn.compare.groups import group_runs  # imports pandas

        groups = group_runs(similar).values()
        spread = [[run.metrics["val/loss"] for run in runs] for runs in groups if len(runs) > 1]
    degrees = sum(len(losses) - 1 for losses in spread)
    if degrees < MIN_DEGREES:
        return TYPICAL_DEVIATION, (
            f"if losses vary over seeds as at model=tiny after 1,000 steps (standard deviation "
            f"{TYPICAL_DEVIATION:g} nats)"
        )
    pooled = sum((len(losses) - 1) * variance(losses) for losses in spread) / degrees
    deviation, runs = math.sqrt(pooled), sum(map(len, spread))
    return (
        deviation,
        f"judging by {runs} finished runs like these (standard deviation {deviation:.2g} nats)",
    )


def _is_similar(run: Run, cfg: TrainConfig) -> bool:
    """Whether the run has the size, data and budget of `cfg`, whatever its attention."""
    settings = result_settings(flat(asdict(cfg)))
    own = [
        key
        for key in settings
        if key.startswith(("model.", "block.", "budget", "batch_size")) and key != "model.d_mlp"
    ]  # `match` changes the width of the MLP
    return (
        all(run.settings.get(key) == settings[key] for key in own)
        and run.places.get("data.path", "None") == str(cfg.data.get("path"))
        and all(run.choices.get(key) == cfg.choices[key] for key in ("data", "tokenizer"))
    )
