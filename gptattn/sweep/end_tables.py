"""Prints the end of a sweep: a table of the finished runs and one of the failed runs."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gptattn import command
from gptattn.runs.folder import RunFolder


def print_end(console: Console, done: Sequence[Path], failed: dict[Path, str]) -> None:
    """Print losses and costs of the finished runs, and why the others failed."""
    if done:
        _print_done(console, done)
    if failed:
        table = Table(title="failed", title_justify="left", box=box.SIMPLE_HEAD)
        table.add_column("run", overflow="fold")
        table.add_column("why", overflow="fold")
        for path, why in failed.items():
            log = RunFolder(path).console_file
            table.add_row(Text(path.name), Text(f"{why}\n{log}" if log.is_file() else why))
        console.print(table)


def _print_done(console: Console, done: Sequence[Path]) -> None:
    from gptattn.compare.extended import at_first_budgets
    from gptattn.compare.finished_runs import read_runs
    from gptattn.compare.sections import differences
    from gptattn.compare.table import terminal_table

    runs = read_runs(done)[0]
    # Show an extended run as it was when its first budget ended, as the report does.
    runs = at_first_budgets(runs)[0][: len(runs)]
    console.print(terminal_table(runs, f"{len(runs)} run{'s' * (len(runs) > 1)}", console.width))
    folders = sorted({path.parent for path in done})
    # The report reads whole folders, which may also hold runs of other commands.
    apart = bool(differences(read_runs(folders)[0]))
    arguments = [*map(str, folders), *["--split"] * apart]
    console.print(f"report: {command('compare')} {shlex.join(arguments)}", soft_wrap=True)
