"""The runs of a sweep, and which of them are done: the run folders say so, whoever made them."""

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from gptattn.config import TrainConfig
from gptattn.cpus import usable_cpus
from gptattn.errors import ConfigError
from gptattn.sweep.ledger import read_ledger
from gptattn.untrusted import CONFIG_BYTES, SUMMARY_BYTES, read_bytes, read_yaml

# Settings under which the same run is made.
NO_MATTER = ("sweep", "experiment_name", "cache_dir", "hang_seconds")
# Exit codes of a run that would only end the same way: settings, data, checkpoints, NaN.
FOR_GOOD = (2, 3, 4, 5)


@dataclass(frozen=True)
class Plan:
    """One run to be: the overrides that make it, what they come to, and where it will lie."""

    overrides: list[str]
    cfg: TrainConfig
    folder: Path
    bytes_on_disk: int = 0  # that the folder will hold; 0: not known yet
    seconds: float | None = None  # that it will take, roughly, alone on the machine; None: unknown

    @property
    def begun(self) -> bool:
        """Whether a run lies in its folder, which it goes on with."""
        return (self.folder / "config.yaml").is_file()


def settings_key(settings: dict[str, Any]) -> str:
    """Equal for settings that make the same run: how a sweep is run is no part of it."""
    own = {k: v for k, v in settings.items() if k not in NO_MATTER}
    own["trainer"] = {k: v for k, v in own["trainer"].items() if k != "threads"}
    return json.dumps(own, sort_keys=True)


def finished_runs(folder: Path) -> dict[str, Path]:
    """The finished runs right below `folder`, by their settings' key; of equal ones the newest."""
    runs: dict[str, Path] = {}
    summaries = sorted(folder.glob("*/summary.json"), key=lambda path: path.stat().st_mtime)
    for summary in summaries:
        try:
            done = json.loads(read_bytes(summary, SUMMARY_BYTES))["status"] == "done"
            if done:
                config = read_yaml(summary.parent / "config.yaml", CONFIG_BYTES)
                runs[settings_key(config)] = summary.parent
        except (OSError, ValueError, LookupError, TypeError, AttributeError, yaml.YAMLError):
            continue  # half a record is none: the run is made again
    return runs


def folders_done(plans: Sequence[Plan]) -> dict[Path, Path]:
    """By the folder of each plan that is done already: the folder of the run that is."""
    known: dict[Path, dict[str, Path]] = {}
    done = {}
    for plan in plans:
        home = plan.folder.parent
        if home not in known:
            known[home] = finished_runs(home)
        folder = known[home].get(settings_key(asdict(plan.cfg)))
        if folder is not None:
            done[plan.folder] = folder
    return done


def going_on(plans: Sequence[Plan], done: Collection[Path]) -> list[Plan]:
    """The plans, those in the folder of a run that was begun which can go on with one.

    Such a run has the same settings and a checkpoint, and did not end by a mistake that it would
    make again. Plans with a folder in `done` stay as they are.
    """
    known: dict[Path, dict[str, Path]] = {}
    plans = list(plans)
    for i, plan in enumerate(plans):
        home = plan.folder.parent
        if plan.folder in done:
            continue
        if home not in known:
            known[home] = begun_runs(home)
        folder = known[home].pop(settings_key(asdict(plan.cfg)), plan.folder)
        plans[i] = replace(plan, folder=folder)
    return plans


def begun_runs(home: Path) -> dict[str, Path]:
    """Runs right below `home` that can go on, by their settings' key; of equal ones the newest."""
    failed = {
        entry.get("run"): entry.get("exit")
        for entry in read_ledger(home)
        if entry.get("state") in ("failed", "done", "interrupted")
    }
    runs: dict[str, Path] = {}
    configs = sorted(home.glob("*/config.yaml"), key=lambda path: path.stat().st_mtime)
    for config in configs:
        folder = config.parent
        if (folder / "summary.json").exists() or failed.get(folder.name) in FOR_GOOD:
            continue
        if any((folder / "checkpoints").glob("*.ckpt")):
            try:
                runs[settings_key(read_yaml(config, CONFIG_BYTES))] = folder
            except (OSError, ValueError, LookupError, TypeError, AttributeError, yaml.YAMLError):
                continue
    return runs


def slots(cfg: TrainConfig) -> int:
    """How many runs at once. Raises ConfigError for more than the cores allow."""
    jobs, threads = cfg.sweep.jobs, cfg.trainer.threads
    if cfg.trainer.accelerator == "gpu":
        return jobs or 1
    most = max(1, usable_cpus() // (threads or 1))
    if jobs is not None and jobs > most:
        needs = f" of {threads} threads" if threads else ""
        raise ConfigError("sweep.jobs", f"{jobs} at once{needs} is too many; at most {most} here")
    return jobs or (most if threads else 1)


def threads_each(cfg: TrainConfig) -> int | None:
    """Threads for each run of several at once, where the user has not said; None: leave it."""
    at_once = slots(cfg)
    if cfg.trainer.threads is not None or at_once == 1:
        return None
    return max(1, usable_cpus() // at_once)
