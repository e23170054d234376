"""The end of a sweep on the console: a table of what is done, and one of what failed."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gptattn import command
from gptattn.runs.folder import RunFolder


def print_end(
    console: Console, done: Sequence[Path], failed: dict[Path, str], *, uptrained: bool
) -> None:
    """Losses and costs of the finished runs, and why others failed.

    `uptrained`: some go on from the weights of others; a report of their own shows those.
    """
    if done:
        _print_done(console, done, uptrained)
    if failed:
        table = Table(title="failed", title_justify="left", box=box.SIMPLE_HEAD)
        table.add_column("run", overflow="fold")
        table.add_column("why", overflow="fold")
        for path, why in failed.items():
            log = RunFolder(path).console_file
            table.add_row(Text(path.name), Text(f"{why}\n{log}" if log.is_file() else why))
        console.print(table)


def _print_done(console: Console, done: Sequence[Path], uptrained: bool) -> None:
    from gptattn.compare.extended import at_first_budgets
    from gptattn.compare.finished_runs import read_runs
    from gptattn.compare.sections import differences
    from gptattn.compare.table import terminal_table

    runs = read_runs(done)[0]
    # One that went on is shown where its first budget ended, as the report does.
    runs = at_first_budgets(runs)[0][: len(runs)]
    # What was uptrained has a table of its own, by method and share of steps, in its report.
    shown = [run for run in runs if not run.origin] if uptrained else runs
    if shown:
        title = f"{len(shown)} run{'s' * (len(shown) > 1)}{' from scratch' * uptrained}"
        console.print(terminal_table(shown, title, console.width))
    folders = sorted({path.parent for path in done})
    report = command("uptrain_report" if uptrained else "compare")
    # Runs of other commands may lie there too, and the report takes all of them.
    apart = not uptrained and bool(differences(read_runs(folders)[0]))
    arguments = [*map(str, folders), *["--split"] * apart]
    console.print(f"report: {report} {shlex.join(arguments)}", soft_wrap=True)
