"""Drops runs that a newer one replaces, and reports differences in code and environment."""

from collections.abc import Sequence

from gptattn.compare.finished_runs import Run, seedless
from gptattn.compare.setting_words import counted
from gptattn.machine.source_code import is_unchanged
from gptattn.settings.identity import differences

NAMES = 5  # module names in one line
OF_MAKING = ("text", "device", "init_from")  # keys of Run.settings that Run.making also records


def without_replaced(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """Return the runs that count, and one line for each run that another one replaces.

    A run replaces another in the same sweep folder if it has the same settings and seed, but
    different code, text, device or starting weights. The newest one counts. Runs of the current
    code come before all others, since an edit may have been undone. A run with the same making as
    the one that counts is kept.
    """
    chosen: dict[tuple[object, ...], Run] = {}
    for run in sorted(runs, key=lambda run: (_is_todays(run), run.finished)):
        chosen[_command(run)] = run
    kept, lines = [], []
    for run in runs:
        other = chosen[_command(run)]
        why = differences(run.making, other.making) if other.making else []
        if why:
            lines.append(f"{run.folder}: replaced by {other.folder.name} ({', '.join(why)})")
        else:
            kept.append(run)
    return kept, lines


def _is_todays(run: Run) -> bool:
    making = run.making
    return making is not None and not making.earlier and is_unchanged(making.code)


def _command(run: Run) -> tuple[object, ...]:
    settings = {k: v for k, v in run.settings.items() if k not in OF_MAKING} | run.places
    # Leave out the seed and id: the run that gave the starting weights may be replaced, too.
    settings["init_from"] = seedless(run.places.get("init_from", ""))
    return run.folder.parent, run.variant, run.seed, *sorted(settings.items())


def differences_in_making(runs: Sequence[Run]) -> list[str]:
    """Return one line for each difference in code or environment between the runs."""
    runs = list({run.folder: run for run in runs}.values())  # an extended run may occur twice
    lines = []
    unknown = [run for run in runs if run.making is None]
    if unknown:
        lines.append(f"the code of {_counted(unknown)} is unknown: it was not recorded")
    resumed = [run for run in runs if run.making and run.making.earlier]
    if resumed:
        lines.append(f"{_counted(resumed)} resumed with different code or schedule")
    if names := _differing(runs):
        lines.append(f"the runs differ in code that affects results: {_listed(names)}")
    return lines + _differences_in_environment(runs)


def _differing(runs: Sequence[Run]) -> list[str]:
    """Return the modules whose hash differs between the runs that have them."""
    hashes: dict[str, set[str]] = {}
    for run in runs:
        for name, value in run.making.code.items() if run.making else ():
            hashes.setdefault(name, set()).add(value)
    return sorted(name for name, values in hashes.items() if len(values) > 1)


def _differences_in_environment(runs: Sequence[Run]) -> list[str]:
    lines = []
    for key in sorted({k for run in runs for k in run.environment if k != "platform"}):
        values = [run.environment.get(key, "unknown") for run in runs]
        if len(set(values)) > 1:
            shown = counted([_short(value) for value in values])
            lines.append(f"the runs differ in {key.removeprefix('libraries.')} ({shown})")
    return lines


def _short(value: str) -> str:
    """Shorten a commit to twelve digits, and keep a `-dirty` mark."""
    commit, dash, dirty = value.partition("-dirty")
    return f"{commit[:12] if len(commit) == 40 else commit[:40]}{dash}{dirty}"


def _counted(runs: Sequence[Run]) -> str:
    return "1 run" if len(runs) == 1 else f"{len(runs)} runs"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMES} more" if len(names) > NAMES else ""
    return ", ".join(names[:NAMES]) + more
