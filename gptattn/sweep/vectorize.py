"""Which runs of a sweep one process trains as one model: seeds of one variant."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from gptattn.errors import ConfigError
from gptattn.settings.config import TrainConfig
from gptattn.settings.identity import flat
from gptattn.sweep.plan import Plan

SEEDS = "--seeds="  # the argument of the process that says which seed goes to which folder


def check_vectorize(cfg: TrainConfig) -> None:
    """Raise ConfigError for what `sweep.vectorize` cannot train as it would be trained alone."""
    for setting, why in _refusals(cfg) if cfg.sweep.vectorize is not None else ():
        raise ConfigError(
            "sweep.vectorize", f"cannot be had with {setting}, which {why}; leave one of them out"
        )


def _refusals(cfg: TrainConfig) -> Iterator[tuple[str, str]]:
    """Yield each setting that seeds cannot have together, and why."""
    groups = {"model": asdict(cfg.model), "attn": cfg.attn, "part": cfg.part}
    for name, value in flat(groups | {"pattern_attn": cfg.pattern_attn or {}}).items():
        if name.endswith(".dropout") and _above_zero(value):
            yield f"{name}={value}", "would drop other weights than in a run alone"
        if name.endswith(".backend") and value == "flex":
            yield f"{name}={value}", "compiles its kernel for one model"
    if cfg.model.recompute:
        yield "model.recompute=true", "keeps the memory of one model small"
    if cfg.compile:
        yield "compile=true", "compiles the blocks of one model"
    if cfg.budget.seconds is not None:
        yield f"budget.seconds={cfg.budget.seconds:g}", "needs a run's own speed"
    if cfg.budget.steps == 0:
        yield "budget.steps=0", "trains nothing"
    if cfg.optim.matrices is not None:
        yield f"optim={cfg.choices['optim']}", "updates the matrices of one model"
    if cfg.trainer.precision != "32-true":
        given = "auto" if cfg.trainer.auto_precision else cfg.trainer.precision
        chose = f"chose {cfg.trainer.precision}, which " if cfg.trainer.auto_precision else ""
        yield f"trainer.precision={given}", f"{chose}has not been tried for several seeds at once"


def _above_zero(value: str) -> bool:
    """Whether it is a number above 0; what is no number is for the mechanism itself to refuse."""
    try:
        return float(value) > 0
    except ValueError:
        return False


def grouped(plans: Sequence[Plan]) -> list[list[Plan]]:
    """Return the plans in groups of up to `sweep.vectorize` that differ in the seed alone.

    Groups are in the order of their first plans. A plan that continues a begun run stays alone:
    the others would have to wait for it.
    """
    size = plans[0].cfg.sweep.vectorize or 1
    groups: list[list[Plan]] = []
    open_groups: dict[str, list[Plan]] = {}
    for plan in plans:
        key = repr(asdict(replace(plan.cfg, seed=0)))
        group = open_groups.get(key, [])
        if plan.begun or not 0 < len(group) < size:
            group = []
            groups.append(group)
        group.append(plan)
        if not plan.begun:
            open_groups[key] = group
    return groups


def seeds_argument(group: Sequence[Plan]) -> list[str]:
    """Return the argument that adds a group's seeds to the command of its first run."""
    if len(group) == 1:
        return []
    return [SEEDS + json.dumps({plan.cfg.seed: str(plan.folder.absolute()) for plan in group})]


def read_seeds(argument: str) -> Mapping[int, Path]:
    """Return seed -> folder, as `seeds_argument` wrote it."""
    found = json.loads(argument.removeprefix(SEEDS))
    return {int(seed): Path(folder) for seed, folder in found.items()}
