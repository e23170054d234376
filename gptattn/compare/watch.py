"""Follows sweeps that are still running: says what is open, and reports anew as runs end."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gptattn.compare.finished_runs import one_line, seedless
from gptattn.errors import ConfigError
from gptattn.runs.sweep_states import PLANNED, SWEEP_LOCK, SweepStates, is_sweep, sweep_states

NAMED = 3  # failed runs that are named, with their reasons


@dataclass(frozen=True)
class Following:
    """What a report says of the sweeps that it follows."""

    lines: list[str]
    open: bool  # whether any run is not done
    seconds: float | None = None  # between two looks; None: this was the last one


def looks(
    sweeps: Sequence[Path], wait: Callable[[float], object], seconds: float
) -> Iterator[Following]:
    """Yield what is open, at first and whenever it has changed, until no sweep is running.

    Between two looks `wait` is called with `seconds`.
    """
    told: list[str] | None = None
    while True:
        found = [sweep_states(sweep) for sweep in sweeps]
        if not any(sweep.going for sweep in found):
            yield _following(found)
            return
        look = _following(found, seconds)
        if look.lines != told:
            yield look
            told = look.lines
        wait(seconds)


def last_look(sweeps: Sequence[Path]) -> Following:
    """Return what is open of sweeps that will not be looked at again."""
    return _following([sweep_states(sweep) for sweep in sweeps])


def _following(sweeps: Sequence[SweepStates], seconds: float | None = None) -> Following:
    lines = [line for sweep in sweeps for line in open_lines(sweep)]
    states = {state for sweep in sweeps for state in sweep.states.values()}
    return Following(lines, states != {"done"}, seconds)


def sweeps_in(folders: Sequence[Path]) -> list[Path]:
    """Return the sweeps that the folders are, or else hold. Raises ConfigError without any."""
    found: list[Path] = []
    for folder in folders:
        inner = {path.parent for name in (PLANNED, SWEEP_LOCK) for path in folder.glob(f"*/{name}")}
        found += [folder] if is_sweep(folder) else sorted(inner)
    if not found:
        where = one_line(" ".join(map(str, folders)))
        raise ConfigError("--watch", f"no sweep in {where}; give the folder of a running sweep")
    return list(dict.fromkeys(found))


def open_lines(sweep: SweepStates) -> list[str]:
    """Return what of the sweep is done, and what is open, of which variants.

    `outputs/a: 5 of 9 runs are done; 2 running (mha 1, gqa 1); 2 planned (mqa 2)`.
    """
    runs = {state: [] for state in ("done", "running", "submitted")}
    for run, state in sweep.states.items():
        runs.setdefault(state, []).append(run)
    done, running, planned = (runs.pop(state) for state in ("done", "running", "submitted"))
    words = [f"{sweep.folder}: {len(done)} of {len(sweep.states)} runs are done"]
    if sweep.going:
        words += _counted(running, "running") + _counted(planned, "planned")
    else:
        words += _counted([*running, *planned], "never ended, as the sweep was stopped")
    for state, names in sorted(runs.items()):
        words += _counted(names, state)
    lines = ["; ".join(words)]
    reasons = {run: why for run, why in sweep.reasons.items() if sweep.states[run] == "failed"}
    lines += [f"{run} failed: {why}" for run, why in list(reasons.items())[:NAMED]]
    if len(reasons) > NAMED:
        lines.append(f"{len(reasons) - NAMED} more failed")
    return [one_line(line) for line in lines]


def _counted(names: Sequence[str], what: str) -> list[str]:
    variants = Counter(seedless(name) for name in names)
    each = ", ".join(f"{variant} {count}" for variant, count in variants.items())
    return [f"{len(names)} {what} ({each})"] if names else []
