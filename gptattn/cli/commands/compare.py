"""Compare finished runs: a table, and a page with intervals, tests and plots."""

import argparse
import shlex
import sys
import time
from pathlib import Path
from typing import NoReturn

from gptattn.compare.finished_runs import one_line, read_runs
from gptattn.compare.watch import Following, last_look, looks, sweeps_in
from gptattn.errors import ConfigError, DataError
from gptattn.machine.ending import run_command


def main() -> NoReturn:
    """Run `gptattn-compare FOLDER...`. Exits with the codes of `gptattn.errors`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "folders",
        nargs="*",
        type=Path,
        default=[Path("outputs")],
        help="run or sweep folders; default: outputs",
    )
    parser.add_argument("--baseline", metavar="NAME", help="row to compare with; default: mha")
    parser.add_argument(
        "--split",
        action="store_true",
        help="report runs with different data or validation separately; default: refuse",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="default: comparison/ in the first folder"
    )
    parser.add_argument(
        "--watch", action="store_true", help="write the page again as the runs of a sweep end"
    )
    parser.add_argument(
        "--every", type=float, default=10.0, metavar="SECONDS", help="with --watch; default: 10"
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--no-files", action="store_true", help="print only; write no files")
    kind.add_argument(
        "--markdown", action="store_true", help="print the table as Markdown; write no files"
    )
    kind.add_argument(
        "--board",
        type=Path,
        metavar="DIR",
        help="also write each variant's mean and interval for TensorBoard, outside the runs",
    )
    args = parser.parse_args()
    sys.exit(run_command(lambda: _watch(args) if args.watch else _report(args)))


def _report(args: argparse.Namespace, following: Following | None = None) -> None:
    """Compare the runs, then print or write what was asked.

    `following`: how far a watched sweep is. Then only the page is written, unless it has ended.
    """
    from gptattn.compare.comparison import compare
    from gptattn.compare.terminal import show

    runs, passed_over = read_runs(args.folders)
    comparison = compare(
        runs,
        folders=[one_line(str(folder)) for folder in args.folders],
        baseline=args.baseline,
        split=args.split,
        passed_over=passed_over,
    )
    if following is None:
        for line in comparison.passed_over:
            print(f"passed over: {line}", file=sys.stderr)
    if args.markdown:
        from gptattn.compare.table import markdown_table, report_rows

        for section in comparison.sections:
            print(*filter(None, [section.title, markdown_table(report_rows(section))]), sep="\n\n")
        return
    if args.no_files:
        show(comparison)
        return

    from gptattn.compare.files import claim, disk_errors
    from gptattn.compare.write import with_curves, write_report

    first = args.folders[0]
    beside = first.absolute().parent if any(run.folder == first for run in runs) else first
    out = args.out or beside / "comparison"
    claim(out)
    if args.board is not None:
        claim(args.board, option="--board")
    comparison = with_curves(comparison)
    last = following is None or following.seconds is None
    if last:
        show(comparison)
    print(f"page: {write_report(comparison, out, following)}")
    if args.board is not None and last:
        from gptattn.compare.board import write_board

        with disk_errors(args.board, "--board"):
            write_board(comparison, args.board)
        print(f"bands: tensorboard --logdir {shlex.quote(str(args.board))}")


def _watch(args: argparse.Namespace) -> None:
    """Write the page as runs end, until the sweep has ended or Ctrl-C."""
    if args.no_files or args.markdown:
        raise ConfigError("--watch", "writes the page again and again; leave out the other option")
    if not 1 <= args.every <= 3600:
        raise ConfigError("--every", f"{args.every:g} seconds; give 1 to 3600")

    def written(following: Following) -> None:
        print(*following.lines, sep="\n", flush=True)
        try:
            _report(args, following)
        except (ConfigError, DataError) as error:
            if following.seconds is None:
                raise
            why = "no run is done" if isinstance(error, DataError) else one_line(str(error))
            print(f"no page yet: {why}", flush=True)

    sweeps = sweeps_in(args.folders)
    try:
        for look in looks(sweeps, time.sleep, args.every):
            written(look)
    except KeyboardInterrupt:
        written(last_look(sweeps))
        raise
