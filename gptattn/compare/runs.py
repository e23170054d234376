"""Reads finished runs. Whatever is half-written or damaged is named and passed over."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptattn.errors import DataError


@dataclass(frozen=True)
class Run:
    """One finished run: its summary.json."""

    folder: Path
    variant: str
    seed: int
    metrics: dict[str, float]
    settings: dict[str, Any]  # the flat hyperparameters, without the seed


def read_runs(paths: Iterable[Path]) -> tuple[list[Run], list[str]]:
    """All finished runs at or below the paths, and a line for each folder passed over.

    Raises DataError where a path does not exist or no finished run is found.
    """
    runs, passed_over = [], []
    for path in paths:
        if not path.is_dir():
            raise DataError("run folder", f"{path} is no folder; give a run or sweep folder")
        for folder in _run_folders(path):
            try:
                runs.append(_read(folder))
            except (OSError, ValueError, KeyError, TypeError) as error:
                reason = "not finished" if isinstance(error, FileNotFoundError) else repr(error)
                passed_over.append(f"{folder}: {reason}")
    if not runs:
        raise DataError("run folder", "no finished run there; train one first: python train.py")
    return runs, passed_over


def _run_folders(path: Path) -> Iterator[Path]:
    """A run's folder is known by the config.yaml that claims it; Hydra's copy is not one."""
    for config in sorted(path.rglob("config.yaml")):
        if config.parent.name != ".hydra":
            yield config.parent


def _read(folder: Path) -> Run:
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    settings = {k: v for k, v in summary["hyperparameters"].items() if k != "seed"}
    metrics = {str(k): float(v) for k, v in summary["metrics"].items()}
    return Run(folder, str(summary["variant"]), int(summary["seed"]), metrics, settings)
