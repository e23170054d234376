"""The runs of a sweep, and which of them are done: the run folders say so, whoever made them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from gptattn.errors import ConfigError
from gptattn.machine.cpus import usable_cpus
from gptattn.runs.folder import RunFolder, begun_below, done_below
from gptattn.settings.config import TrainConfig
from gptattn.settings.identity import (
    Making,
    at_step,
    differences,
    flat,
    places,
    settings_key,
)
from gptattn.sweep.ledger import read_ledger

# Exit codes of a run that would only end the same way: settings, data, checkpoints, NaN.
FOR_GOOD = (2, 3, 4, 5)


@dataclass(frozen=True)
class Plan:
    """One run to be: the overrides that make it, what they come to, and where it will lie."""

    overrides: list[str]
    cfg: TrainConfig
    folder: Path
    bytes_on_disk: int = 0  # that the folder will hold; 0: not known yet
    making: Making | None = None  # beside its settings, if it starts now; None: not known yet
    seconds: float | None = None  # that it will take, roughly, alone on the machine; None: unknown

    @property
    def begun(self) -> bool:
        """Whether a run lies in its folder, which it goes on with."""
        return RunFolder(self.folder).begun


@dataclass(frozen=True)
class Found:
    """What lies in the sweep's folder already, by the folders of the plans."""

    done: dict[Path, Path]  # the finished run that is the plan's
    stale: dict[Path, tuple[Path, str]]  # one with its settings of another making, and in what


@dataclass(frozen=True)
class Finished:
    """A run that is done, or was: the step where its first budget ended, if it went on then."""

    folder: Path
    until: int | None = None


def folders_done(
    plans: Sequence[Plan], *, keep_stale: bool = False, with_weights: bool = False
) -> Found:
    """Which plans are done. `keep_stale`: also by runs that would not come out the same now.

    `with_weights`: only by runs that still have theirs, as others are to start from them.
    """
    known: dict[Path, dict[str, list[Finished]]] = {}
    found = Found({}, {})
    for plan in plans:
        home = plan.folder.parent
        if home not in known:
            known[home] = finished_runs(home)
        for run in reversed(known[home].get(settings_key(asdict(plan.cfg)), [])):
            folder = run.folder
            why = _not_the_same(folder, plan, run.until)
            if with_weights and (run.until or not RunFolder(folder).has_checkpoint):
                continue
            if why and not _same_places(folder, plan):
                continue  # it is not what the command names
            if not why or keep_stale:
                found.done[plan.folder] = folder
                found.stale.pop(plan.folder, None)
                break
            found.stale.setdefault(plan.folder, (folder, why))
    return found


def _not_the_same(folder: Path, plan: Plan, until: int | None = None) -> str:
    """In what the run in the folder, which has the plan's settings, differs; empty: in nothing.

    `until`: the last step that counts of it; None: the last that it took.
    """
    if plan.making is None:
        return "what would make it now is not known"
    was = RunFolder(folder).read_making()
    was = at_step(was, until) if was and until else was
    return ", ".join(differences(was, plan.making))


def _same_places(folder: Path, plan: Plan) -> bool:
    """Whether the run in the folder was told to find text and weights where the plan is."""
    recorded = flat(RunFolder(folder).read_settings())
    return places(recorded) == places(flat(asdict(plan.cfg)))


def finished_runs(home: Path) -> dict[str, list[Finished]]:
    """The finished runs right below `home`, by their settings' key; the newest last.

    One that was extended counts where its first budget ended: its schedule was over there.
    """
    runs: dict[str, list[Finished]] = {}
    for folder in done_below(home):
        summary = folder.finished()
        if summary is None:
            continue
        try:
            first = (summary.get("completed") or [{}])[0]
            extended = bool(first) and first["step"] < summary["steps"]
            budget = {"budget": first["budget"]} if extended else {}
            key = settings_key(folder.read_settings() | budget)
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            continue  # half a record is none: the run is made again
        runs.setdefault(key, []).append(Finished(folder.path, first["step"] if extended else None))
    return runs


def _recorded_key(folder: RunFolder) -> str | None:
    try:
        return settings_key(folder.read_settings())
    except (OSError, ValueError, LookupError):
        return None


def going_on(plans: Sequence[Plan], found: Found, *, keep_stale: bool = False) -> list[Plan]:
    """The plans, those in the folder of a run that was begun which can go on with one.

    Such a run has the same settings, a checkpoint and, unless `keep_stale`, the same making, and
    did not end by a mistake that it would make again. Plans that are done stay as they are; runs
    of another making are added to what is stale.
    """
    known: dict[Path, dict[str, list[Path]]] = {}
    plans = list(plans)
    for i, plan in enumerate(plans):
        home = plan.folder.parent
        if plan.folder in found.done:
            continue
        if home not in known:
            known[home] = begun_runs(home)
        folders = known[home].get(settings_key(asdict(plan.cfg)), [])
        why = {folder: _not_the_same(folder, plan) for folder in folders}
        folders = [f for f in folders if not why[f] or _same_places(f, plan)]
        fitting = [folder for folder in folders if keep_stale or not why[folder]]
        if fitting:
            known[home][settings_key(asdict(plan.cfg))].remove(fitting[-1])
            plans[i] = replace(plan, folder=fitting[-1])
        elif folders:
            found.stale.setdefault(plan.folder, (folders[-1], why[folders[-1]]))
    return plans


def begun_runs(home: Path) -> dict[str, list[Path]]:
    """Runs right below `home` that can go on, by their settings' key; the newest last."""
    failed = {
        entry.get("run"): entry.get("exit")
        for entry in read_ledger(home)
        if entry.get("state") in ("failed", "done", "interrupted")
    }
    runs: dict[str, list[Path]] = {}
    for folder in begun_below(home):
        if folder.done or failed.get(folder.path.name) in FOR_GOOD:
            continue
        key = _recorded_key(folder)
        if key is not None and folder.has_checkpoint:
            runs.setdefault(key, []).append(folder.path)
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
    parallel = slots(cfg)
    if cfg.trainer.threads is not None or parallel == 1:
        return None
    return max(1, usable_cpus() // parallel)
