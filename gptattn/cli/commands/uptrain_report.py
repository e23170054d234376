"""Report what uptraining shows: a table, a plot, and words, out of run folders alone."""

import argparse
import sys
from pathlib import Path
from typing import NoReturn

from gptattn import command
from gptattn.cli.ending import ended
from gptattn.compare.finished_runs import one_line, read_runs


def main() -> NoReturn:
    """`uptrain_report.py FOLDER`. Exits with the codes of `gptattn.errors`."""
    parser = argparse.ArgumentParser(prog="uptrain_report.py", description=__doc__)
    parser.add_argument("folder", type=Path, help="the sweep's folder, as outputs/uptrain")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="default: report/ in the sweep's folder"
    )
    args = parser.parse_args()
    sys.exit(ended(lambda: _report(args.folder, args.out)))


def _report(folder: Path, chosen: Path | None) -> None:
    from gptattn.compare.makings import differences_in_making, without_replaced
    from gptattn.compare.uptrain.experiment import command_of, find_experiment
    from gptattn.compare.uptrain.uptrain_words import sentences

    runs, passed_over = read_runs([folder])
    runs, replaced = without_replaced(runs)
    for line in [*passed_over, *replaced]:
        print(f"passed over: {line}", file=sys.stderr)
    experiment = find_experiment(runs)
    for line in differences_in_making(runs):
        print(f"warning: {line}", file=sys.stderr)
    from gptattn.compare.files import claim, disk_errors, write
    from gptattn.compare.svg import standalone
    from gptattn.compare.table import cells_table
    from gptattn.compare.uptrain.findings import find
    from gptattn.compare.uptrain.plot import uptrain_plot
    from gptattn.compare.uptrain.uptrain_page import page_text, table_rows

    out = chosen or folder / "report"
    claim(out, None if chosen else folder)
    findings, plot = find(experiment), uptrain_plot(experiment)
    sweep = command_of(folder)
    own = f"{command('uptrain_report')} {one_line(str(folder))}"
    page = page_text(experiment, findings, plot, [sweep, own] if sweep else [])
    with disk_errors(out):
        write(out / f"{plot.name}.png", plot.png)
        write(out / f"{plot.name}.svg", standalone(plot.svg))
        write(out / f"{plot.name}.md", page)
    from gptattn.machine.console import StdoutConsole

    console = StdoutConsole(highlight=False, markup=False, emoji=False)
    console.print(cells_table(table_rows(experiment), one_line(str(folder)), console.width))
    for line in sentences(experiment, findings):
        console.print(f"- {line}")
    print(f"report: {out / f'{plot.name}.md'}")
