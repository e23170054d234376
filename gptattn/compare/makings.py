"""What made the runs: results that newer ones have replaced, and code in which runs differ."""

from collections.abc import Sequence

from gptattn.compare.finished_runs import Run, seedless
from gptattn.compare.groups import counted
from gptattn.machine.source_code import is_todays
from gptattn.settings.identity import differences

NAMES = 5  # of modules in one line
OF_MAKING = ("text", "device", "init_from")  # settings that a run has from its making


def without_replaced(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """The runs, without those that the same command made anew, and a line for each of these.

    Made anew: another run in the same sweep's folder has the same settings and seed, and other
    code, text or starting weights. The newest stays, of those of today's code where there are
    some: an edit may have been undone. A repeat of the same making is none.
    """
    chosen: dict[tuple[object, ...], Run] = {}
    for run in sorted(runs, key=lambda run: (_is_todays(run), run.finished)):
        chosen[_command(run)] = run
    kept, lines = [], []
    for run in runs:
        other = chosen[_command(run)]
        why = differences(run.making, other.making) if other.making else []
        if why:
            lines.append(f"{run.folder}: left out for {other.folder.name} ({', '.join(why)})")
        else:
            kept.append(run)
    return kept, lines


def _is_todays(run: Run) -> bool:
    making = run.making
    return making is not None and not making.earlier and is_todays(making.code)


def _command(run: Run) -> tuple[object, ...]:
    settings = {k: v for k, v in run.settings.items() if k not in OF_MAKING} | run.places
    # Weights that each seed has of its own are named after their run, which may be made anew.
    settings["init_from"] = seedless(run.places.get("init_from", ""))
    return run.folder.parent, run.variant, run.seed, *sorted(settings.items())


def differences_in_making(runs: Sequence[Run]) -> list[str]:
    """A line for each thing outside of settings and variants in which the runs differ."""
    runs = list({run.folder: run for run in runs}.values())  # an extended one may be there twice
    lines = []
    unknown = [run for run in runs if run.making is None]
    if unknown:
        lines.append(f"the code of {_counted(unknown)} is unknown: made before it was recorded")
    resumed = [run for run in runs if run.making and run.making.earlier]
    if resumed:
        lines.append(f"{_counted(resumed)} went on with other code or another schedule than before")
    if names := _differing(runs, "code"):
        lines.append(f"the runs differ in the code that makes their numbers: {_listed(names)}")
    counts = {name for run in runs if run.making for name in run.making.code}
    if names := [name for name in _differing(runs, "other") if name not in counts]:
        lines.append(f"the runs differ in code that makes no numbers: {_listed(names)}")
    return lines + _differences_in_environment(runs)


def _differing(runs: Sequence[Run], part: str) -> list[str]:
    """The modules of which runs that have them have different ones."""
    hashes: dict[str, set[str]] = {}
    for run in runs:
        for name, value in getattr(run.making, part, {}).items():
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
    """A commit by its first twelve digits, and whether there were changes beside it."""
    commit, dash, dirty = value.partition("-dirty")
    return f"{commit[:12] if len(commit) == 40 else commit[:40]}{dash}{dirty}"


def _counted(runs: Sequence[Run]) -> str:
    return "1 run" if len(runs) == 1 else f"{len(runs)} runs"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMES} more" if len(names) > NAMES else ""
    return ", ".join(names[:NAMES]) + more
