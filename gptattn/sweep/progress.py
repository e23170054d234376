"""Prints a sweep's plan, and how its runs ended. `plan.py` decides which runs are done."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from gptattn import command
from gptattn.errors import UserError
from gptattn.machine.console import format_duration
from gptattn.runs.folder import RunFolder
from gptattn.runs.metrics import TRAIN_LOSS
from gptattn.runs.rows import read_metrics
from gptattn.sweep.plan import ExistingRuns


def print_plan(home: Path, runs: int, done: int, found: ExistingRuns) -> None:
    """Print the number of runs, how many are done, and which results are stale and why."""
    from gptattn.compare.differences import listed  # imports pandas

    counts = f", {done} already done" if done else ""
    counts += f", {len(found.begun)} to resume" if found.begun else ""
    total = "1 run" if runs == 1 else f"{runs:,} runs"
    print(f"sweep  {total}{counts}, in {home}")
    reasons: dict[str, list[str]] = {}
    for old, why in found.stale.values():
        reasons.setdefault(why, []).append(old.name)
    for why, olds in reasons.items():
        line = f"stale ({why}): {listed(olds)}; training these again, keeping the old results"
        print(f"{line} (to use those, add sweep.keep_stale=true)", flush=True)


def print_refused(refused: Mapping[str, UserError]) -> None:
    """Print the invalid runs, and why, to stderr."""
    for runs, error in refused.items():
        print(f"refused: {runs}: {error}", file=sys.stderr, flush=True)


def describe_running(folder: Path, seconds: float) -> str:
    """Return a line with the step, loss and time left of a run started `seconds` ago."""
    rows = read_metrics(RunFolder(folder))[0]
    last = dict(zip(rows["metric"], rows["value"], strict=True))
    if not (done := last.get("progress/budget")) or TRAIN_LOSS not in last:
        return f"{folder.name}  {format_duration(seconds)}, no step yet"
    left = format_duration(last["progress/seconds"] * (1 - done) / done)
    step = rows["step"].iloc[-1]
    return f"{folder.name}  step {step}  loss {last[TRAIN_LOSS]:.3f}  {done:.0%}  {left} left"


def describe_end(folder: Path, seconds: float) -> str:
    """Return a line with the run's loss and duration, or why it failed."""
    run = RunFolder(folder)
    if run.done:
        loss = run.final_loss()
        value = "" if loss is None else f"val loss {loss:.4f}, "
        return f"done {folder.name}: {value}{format_duration(seconds)}"
    return f"FAILED {folder.name}: {(run.read_failure() or {}).get('error', 'no summary')}"


def print_end(
    done: Sequence[Path], failed: Mapping[Path, str], measures: Sequence[str] | None = None
) -> None:
    """Print the report's tables of the finished runs, and why the others failed.

    `measures`: packages that the runs' settings can name, to measure speeds first; None: don't.
    """
    for path, why in failed.items():
        log = RunFolder(path).console_file
        print(f"failed: {path.name}: {why}" + f"; see {log}" * log.is_file(), flush=True)
    if done:
        from gptattn.compare.comparison import compare
        from gptattn.compare.finished_runs import find_experiment, read_runs
        from gptattn.compare.report import publish
        from gptattn.sweep.speed import measure_rows

        runs = read_runs(done)[0]
        # The report reads whole folders, which can also hold runs of other commands.
        folders = sorted({str(path.parent) for path in done})
        if find_experiment(runs) is None:  # the attention track has its own table
            try:
                if measures is not None:
                    measure_rows(compare(runs), measures)
            finally:  # report the losses even if a signal ends the measurement
                comparison = compare(read_runs(done)[0], folders=folders)
                publish(comparison, Path(folders[0], "comparison"))
        print(f"report: {command('compare')} {shlex.join(folders)}", flush=True)
