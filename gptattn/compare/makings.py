"""What made the runs: results that newer ones have replaced, and code in which runs differ."""

from collections.abc import Sequence

from gptattn.compare.groups import counted
from gptattn.compare.runs import Run
from gptattn.identity import differences

NAMES = 5  # of modules in one line
OF_MAKING = ("text", "device", "init_from")  # settings that a run has from its making


def without_replaced(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """The runs, without those that the same command made anew, and a line for each of these.

    Made anew: a later run in the same sweep's folder has the same settings and seed, and other
    code, text or starting weights. A repeat of the same making is none.
    """
    newest: dict[tuple[object, ...], Run] = {}
    for run in sorted(runs, key=lambda run: run.finished):
        newest[_command(run)] = run
    kept, lines = [], []
    for run in runs:
        newer = newest[_command(run)]
        why = differences(run.making, newer.making) if newer.making else []
        if why:
            lines.append(
                f"{run.folder}: left out, {newer.folder.name} was made later ({', '.join(why)})"
            )
        else:
            kept.append(run)
    return kept, lines


def _command(run: Run) -> tuple[object, ...]:
    settings = {k: v for k, v in run.settings.items() if k not in OF_MAKING} | run.places
    return run.folder.parent, run.variant, run.seed, *sorted(settings.items())


def differences_in_making(runs: Sequence[Run]) -> list[str]:
    """A line for each thing outside of settings and variants in which the runs differ."""
    lines = []
    unknown = [run for run in runs if run.making is None]
    if unknown:
        lines.append(f"the code of {_counted(unknown)} is unknown: made before it was recorded")
    resumed = [run for run in runs if run.making and run.making.earlier]
    if resumed:
        lines.append(f"{_counted(resumed)} went on with other code or another schedule than before")
    if names := _differing(runs, "code"):
        lines.append(f"the variants differ in more than attention: code of {_listed(names)}")
    if names := _differing(runs, "other"):
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
