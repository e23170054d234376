"""Compare finished runs: a table, and a page with intervals, tests and plots."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from gptattn.cli.ending import ended
from gptattn.compare.finished_runs import Run, one_line, read_runs


def main() -> NoReturn:
    """Run `gptattn-compare FOLDER...`. Exits with the codes of `gptattn.errors`."""
    args = _arguments()
    sys.exit(ended(lambda: _report(args)))


def _arguments() -> argparse.Namespace:
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
        help="report runs with different data, tokenizer or validation separately; default: refuse",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="default: comparison/ in the first folder"
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
    return parser.parse_args()


def _report(args: argparse.Namespace) -> None:
    from gptattn.compare.comparison import compare

    runs, passed_over = read_runs(args.folders)
    comparison = compare(
        runs,
        folders=[one_line(str(folder)) for folder in args.folders],
        baseline=args.baseline,
        split=args.split,
        passed_over=passed_over,
    )
    for line in comparison.passed_over:
        print(f"passed over: {line}", file=sys.stderr)
    if args.markdown:
        from gptattn.compare.table import markdown_table, report_rows

        for section in comparison.sections:
            print(*filter(None, [section.title, markdown_table(report_rows(section))]), sep="\n\n")
        return
    from gptattn.compare.files import claim, disk_errors
    from gptattn.compare.terminal import show
    from gptattn.compare.write import with_curves, write_report

    if args.no_files:
        show(comparison)
        return
    out = args.out or _out(args.folders, runs)
    claim(out, None if args.out else out.parent)
    if args.board is not None:
        claim(args.board, option="--board")
    comparison = with_curves(comparison)
    show(comparison)
    page = write_report(comparison, out)
    print(f"page: {page}")
    if args.board is not None:
        from gptattn.compare.board import write_board

        with disk_errors(args.board, "--board"):
            write_board(comparison, args.board)
        print(f"bands: tensorboard --logdir {shlex.quote(str(args.board))}")


def _out(folders: Sequence[Path], runs: Sequence[Run]) -> Path:
    """Return `comparison/` in the first folder, or next to it if that folder is a run."""
    first = folders[0]
    own = any(run.folder == first for run in runs)
    return (first.absolute().parent if own else first) / "comparison"
