"""Compare finished runs: a table, and a page with intervals, tests and plots."""

import argparse
import shlex
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec

from gptattn.compare.finished_runs import SHIPPED, find_experiment, one_line, read_runs
from gptattn.errors import ConfigError
from gptattn.machine.console import StdoutConsole
from gptattn.machine.ending import run_command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gptattn.compare.comparison import Comparison
    from gptattn.compare.finished_runs import Run
    from gptattn.compare.track import Entry


def main() -> NoReturn:
    """Run `gptattn-compare FOLDER...`. Exits with the codes of `gptattn.errors`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "folders",
        nargs="*",
        type=Path,
        default=[Path("outputs")],
        help="run or sweep folders, or benchmarks/track; default: outputs",
    )
    parser.add_argument("--baseline", metavar="NAME", help="row to compare with; default: mha")
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
        help="also write each variant's mean and interval for TensorBoard, into a new folder",
    )
    kind.add_argument(
        "--ship",
        action="store_true",
        help="attention track: also write each entry to benchmarks/, to be shipped",
    )
    args = parser.parse_args()
    sys.exit(run_command(lambda: _report(args)))


def _report(args: argparse.Namespace) -> None:
    """Compare the runs, then print or write what was asked."""
    homes = {folder: experiment for experiment, folder in SHIPPED.items()}
    if len(args.folders) == 1 and args.folders[0].resolve() in homes:
        if args.ship:
            raise ConfigError("--ship", "these entries are shipped already; leave it out")
        _report_track(args, [], [], homes[args.folders[0].resolve()])
        return
    # Before pandas and scipy, which import slowly: a mistake in the folders is reported at once.
    runs, skipped = read_runs(args.folders)
    if (experiment := find_experiment(runs)) is not None:
        _report_track(args, runs, skipped, experiment)
        return

    if args.ship:
        raise ConfigError("--ship", "these are not runs of the attention track; leave it out")

    from gptattn.compare.comparison import compare
    from gptattn.compare.table import markdown_table, report_rows, warning_lines

    comparison = compare(
        runs,
        folders=[one_line(str(folder)) for folder in args.folders],
        baseline=args.baseline,
        skipped=skipped,
    )
    for line in comparison.skipped:
        print(f"skipped: {line}", file=sys.stderr)
    if args.markdown:
        parts = [
            part
            for section in comparison.sections
            for part in (section.title, markdown_table(report_rows(section)))
        ]
        print(*filter(None, parts), sep="\n\n")
        for line in warning_lines(comparison):
            print(f"warning: {line}", file=sys.stderr)
        return

    from gptattn.compare.report import claim_folder, describe_open_sweeps, write_report

    still_open = describe_open_sweeps(args.folders)
    for line in still_open:
        print(f"open: {line}", file=sys.stderr)
    if args.no_files:
        _print(comparison)
        return

    from gptattn.compare.curves import claim_board, read_all_curves, write_board

    first = args.folders[0]
    beside = first.absolute().parent if any(run.folder == first for run in runs) else first
    out = args.out or beside / "comparison"
    claim_folder(out)
    if args.board is not None:
        claim_board(args.board)
    curves, damage = read_all_curves(comparison.runs)
    comparison = replace(comparison, warnings=[*comparison.warnings, *damage])
    _print(comparison)
    print(f"page: {write_report(comparison, curves, out, still_open)}")
    if args.board is not None:
        write_board(comparison, curves, args.board)
        print(f"bands: tensorboard --logdir {shlex.quote(str(args.board))}")


def _report_track(
    args: argparse.Namespace, runs: "Sequence[Run]", skipped: "Sequence[str]", experiment: str
) -> None:
    """Print the attention track with these runs in it; write track.csv and its figure."""
    from gptattn.compare.report import claim_folder, describe_open_sweeps, write_track
    from gptattn.compare.table import cells_table, markdown_table
    from gptattn.compare.track import (
        list_cells,
        list_notes,
        list_regime,
        make_track,
        read_entries,
        read_shipped,
        ship,
        write_shipped,
    )
    from gptattn.data.text import cache_folder
    from gptattn.runs.load import count_caches
    from gptattn.settings.compose import settings
    from gptattn.settings.identity import flat, result_settings
    from gptattn.training.fingerprint import FingerprintCache, agrees

    for option in ("baseline", "board"):
        if getattr(args, option):
            raise ConfigError(f"--{option}", "does not apply to the attention track; leave it out")
    for line in [f"skipped: {one}" for one in skipped] + [
        f"open: {one}" for one in describe_open_sweeps(args.folders)
    ]:
        print(line, file=sys.stderr)
    cache = FingerprintCache(cache_folder(None) / "fingerprints.json")

    def compute(entry: "Entry") -> list[float]:
        overrides = entry.list_overrides(experiment)
        if not cache.has(overrides):
            print(f"once for this code: training {entry.name} for three steps", file=sys.stderr)
        return cache.compute(overrides)

    shipped = SHIPPED[experiment]
    own, others = read_entries(runs, count_caches), read_shipped(shipped)
    if own:  # which must have the experiment's settings of today
        today = list_regime(result_settings(flat(asdict(settings([f"experiment={experiment}"])))))
        others = [msgspec.structs.replace(one, regime=today | one.regime) for one in others]
    track = make_track(own, others, lambda entry: agrees(entry.fingerprint, compute(entry)))
    cells, notes = list_cells(track), list_notes(track)
    if args.markdown:
        print(markdown_table(cells), *(f"- {note}" for note in notes), sep="\n")
        return
    console = StdoutConsole(highlight=False, markup=False, emoji=False)
    console.print(cells_table(cells, "The attention track", console.width))
    for note in notes:
        console.print(f"- {note}")
    if track.rows and not args.no_files and (runs or args.out):
        out = args.out or args.folders[0] / "comparison"
        claim_folder(out)
        for picture in write_track(track, out):
            print(f"figure: {picture}")
    if args.ship:
        trained = {entry.name for entry in own}
        known = [*track.baseline.values(), *(row.entry for row in track.rows)]
        chosen = [
            entry if entry.is_shipped else ship(entry, compute(entry), others)
            for entry in known
            if entry.name in trained
        ]
        write_shipped(chosen, shipped)
        names = ", ".join(dict.fromkeys(entry.name for entry in chosen))
        print(f"shipped to {shipped}: {names or 'nothing'}")


def _print(comparison: "Comparison") -> None:
    from gptattn.compare.table import print_tables, warning_lines

    print_tables(comparison, StdoutConsole(highlight=False, markup=False, emoji=False))
    for line in warning_lines(comparison):
        print(f"warning: {line}", file=sys.stderr)
