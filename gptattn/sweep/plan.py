"""The planned runs of a sweep, and which of them are done, according to the run folders alone."""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from gptattn.errors import UserError
from gptattn.runs.folder import RunFolder, begun_below, done_below
from gptattn.runs.sweep_states import read_ledger
from gptattn.settings.config import TrainConfig
from gptattn.settings.identity import (
    Making,
    at_step,
    differences,
    flat,
    places,
    settings_key,
)

VARIANTS = "hydra.sweeper.variants"
DIVERGED = 5  # the exit code of a run whose loss became NaN or infinite
# Exit codes after which another start would fail alike: settings, data, checkpoint, NaN.
FINAL_EXIT_CODES = (2, 3, 4, DIVERGED)


@dataclass(frozen=True)
class Plan:
    """One planned run: its overrides, the settings they give, and its folder."""

    overrides: list[str]
    cfg: TrainConfig
    folder: Path
    bytes_on_disk: int = 0  # expected size of the folder; 0: not known yet
    making: Making | None = None  # that the run would have if it started now; None: not known yet
    seconds: float | None = None  # rough duration, alone on the machine; None: unknown
    together: int | None = None  # processes at a time in the sweep, were none done; None: unknown
    variant: str = ""  # the entry of hydra.sweeper.variants that it comes from, if any

    @property
    def begun(self) -> bool:
        """Whether its folder already holds a run, which this plan continues."""
        return RunFolder(self.folder).begun


@dataclass(frozen=True)
class Found:
    """Existing runs in the sweep's folder, by the folder of the plan that they match."""

    done: dict[Path, Path]  # plan folder -> finished run that makes the plan unnecessary
    # Plan folder -> (run with the same settings but another making, how the makings differ).
    stale: dict[Path, tuple[Path, str]]


@dataclass(frozen=True)
class Finished:
    """A run that finished its first budget."""

    folder: Path
    until: int | None = None  # step where the first budget ended; None: the run was not extended


@contextmanager
def naming(variant: str) -> Iterator[None]:
    """In this block, let a user's mistake name the variant that it stands in."""
    try:
        yield
    except UserError as error:
        if not variant:
            raise
        raise type(error)(error.field, f"{error.message}; in {VARIANTS}: {variant}") from error


def folders_done(
    plans: Sequence[Plan], *, keep_stale: bool = False, with_weights: bool = False
) -> Found:
    """Find finished runs for the plans: same settings, and the same making unless `keep_stale`.

    With `with_weights` a run must also have a checkpoint and no extension, because other runs will
    start from its weights.
    """
    known: dict[Path, dict[str, list[Finished]]] = {}
    found = Found({}, {})
    for plan in plans:
        home = plan.folder.parent
        if home not in known:
            known[home] = finished_runs(home)
        for run in reversed(known[home].get(settings_key(asdict(plan.cfg)), [])):
            folder = run.folder
            why = _making_difference(folder, plan, run.until)
            if with_weights and (run.until or not RunFolder(folder).has_checkpoint):
                continue
            if why and not _same_places(folder, plan):
                continue  # the command names other files: neither done nor stale
            if not why or keep_stale:
                found.done[plan.folder] = folder
                found.stale.pop(plan.folder, None)
                break
            found.stale.setdefault(plan.folder, (folder, why))
    return found


def _making_difference(folder: Path, plan: Plan, until: int | None = None) -> str:
    """Return how the making of the run in the folder differs from the plan's; "" if it does not.

    `until` is the last step of the run that counts; None: all of its steps.
    """
    if plan.making is None:
        return "its current code is unknown"
    was = RunFolder(folder).read_making()
    was = at_step(was, until) if was and until else was
    return ", ".join(differences(was, plan.making))


def _same_places(folder: Path, plan: Plan) -> bool:
    """Whether the run in the folder has the same paths of text and weights as the plan."""
    recorded = flat(RunFolder(folder).read_settings())
    return places(recorded) == places(flat(asdict(plan.cfg)))


def finished_runs(home: Path) -> dict[str, list[Finished]]:
    """Return `settings_key` -> the finished runs directly below `home`, the newest last.

    An extended run counts with its first budget: its schedule was complete when that ended.
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
            continue  # an incomplete record does not count: the run is made again
        runs.setdefault(key, []).append(Finished(folder.path, first["step"] if extended else None))
    return runs


def _recorded_key(folder: RunFolder) -> str | None:
    try:
        return settings_key(folder.read_settings())
    except (OSError, ValueError, LookupError):
        return None


def with_resumable_folders(
    plans: Sequence[Plan], found: Found, *, keep_stale: bool = False
) -> list[Plan]:
    """Return the plans; a plan that can resume an unfinished run gets that run's folder.

    Such a run has the same settings, a checkpoint and, unless `keep_stale`, the same making, and
    its last exit code is not in FINAL_EXIT_CODES. Plans in `found.done` stay unchanged. Runs with
    another making are added to `found.stale`.
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
        why = {folder: _making_difference(folder, plan) for folder in folders}
        folders = [f for f in folders if not why[f] or _same_places(f, plan)]
        fitting = [folder for folder in folders if keep_stale or not why[folder]]
        if fitting:
            known[home][settings_key(asdict(plan.cfg))].remove(fitting[-1])
            plans[i] = replace(plan, folder=fitting[-1])
        elif folders:
            found.stale.setdefault(plan.folder, (folders[-1], why[folders[-1]]))
    return plans


def begun_runs(home: Path) -> dict[str, list[Path]]:
    """Return `settings_key` -> the runs directly below `home` that can resume, the newest last."""
    ended = exits(home)
    runs: dict[str, list[Path]] = {}
    for folder in begun_below(home):
        if folder.done or ended.get(folder.path.name) in FINAL_EXIT_CODES:
            continue
        key = _recorded_key(folder)
        if key is not None and folder.has_checkpoint:
            runs.setdefault(key, []).append(folder.path)
    return runs


def exits(home: Path) -> dict[object, object]:
    """Return the newest exit code of each run in the ledger of the folder."""
    return {
        entry.get("run"): entry.get("exit")
        for entry in read_ledger(home)
        if entry.get("state") in ("failed", "done", "interrupted")
    }


def folders_diverged(plans: Sequence[Plan]) -> set[Path]:
    """Return the folders of the plans whose run, of the same settings and making, diverged."""
    known: dict[Path, dict[str, list[Path]]] = {}
    found = set()
    for plan in plans:
        home = plan.folder.parent
        if home not in known:
            known[home] = {}
            ends = exits(home)
            for folder in begun_below(home):
                key = _recorded_key(folder)
                if ends.get(folder.path.name) == DIVERGED and not folder.done and key is not None:
                    known[home].setdefault(key, []).append(folder.path)
        runs = known[home].get(settings_key(asdict(plan.cfg)), [])
        if any(not _making_difference(run, plan) for run in runs):
            found.add(plan.folder)
    return found


def in_round(plan: Plan, word: str) -> Plan:
    """Return the plan in the folder that every machine of this round gives to just this run.

    In the folder's name, its digits take the place of the random ones.
    """
    made = plan.making and (plan.making.text, plan.making.device, plan.making.code)
    same = [word, settings_key(asdict(plan.cfg)), plan.overrides, made]
    digest = hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()[:6]
    name = re.sub(r"_[0-9a-f]{6}$", f"_{digest}", plan.folder.name)
    return replace(plan, folder=plan.folder.with_name(name))


def without_repeats(plans: Sequence[Plan]) -> list[Plan]:
    """Return the plans without those that would make the run of an earlier one again."""
    kept: dict[str, Plan] = {}
    for plan in plans:
        kept.setdefault(settings_key(asdict(plan.cfg)), plan)
    return list(kept.values())
