"""Reads finished runs. Whatever is half-written or damaged is named and passed over."""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gptattn.errors import DataError

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the one in C, where it was built
# Settings that no result depends on: runs that differ in them alone differ in nothing.
NO_MATTER = re.compile(
    r"(seed|experiment_name|log_every|checkpoint|cache_dir|allow_targets|data\.path|choices\..*"
    r"|trainer\.accelerator"
    r"|sample\..*|validation\.count|budget\.default_steps)$"
)


@dataclass(frozen=True)
class Run:
    """One finished run: its summary.json."""

    folder: Path
    variant: str
    seed: int
    metrics: dict[str, float]
    settings: dict[str, str]  # all that a result can depend on but the seed, flat


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
            except (
                OSError,
                ValueError,
                KeyError,
                TypeError,
                AttributeError,
                yaml.YAMLError,
            ) as error:
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


def _flat(node: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _read(folder: Path) -> Run:
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    config = yaml.load((folder / "config.yaml").read_text(encoding="utf-8"), Loader=LOADER)
    settings = {key: str(value) for key, value in _flat(config) if not NO_MATTER.match(key)}
    settings["text"] = summary["data"]["text_sha256"][:8]
    settings["device"] = summary["hyperparameters"]["device"]
    metrics = {str(k): float(v) for k, v in summary["metrics"].items()}
    return Run(folder, str(summary["variant"]), int(summary["seed"]), metrics, settings)
