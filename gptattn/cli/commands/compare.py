"""Compares finished runs in a table, and on a page with intervals, tests and plots."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import msgspec

from gptattn.cli.arguments import option, parse, run_script
from gptattn.compare.finished_runs import SHIPPED, Run, find_experiment, one_line, read_runs
from gptattn.errors import ConfigError
from gptattn.machine.console import make_console
from gptattn.machine.disk import claim_folder


@dataclass(frozen=True)
class Arguments:
    """outputs/attention_suite markdown=true"""

    folder: tuple[Path, ...] = option(
        "a folder of runs or sweeps, or one in benchmarks; repeatable; you can leave out `folder=`",
        (Path("outputs"),),
        positional=True,
    )
    baseline: str | None = option(
        "the row to compare with; default: mha, else the name with the fewest words"
    )
    by: tuple[str, ...] = option(
        "the settings to compare, with all others fixed; default: the attention", ()
    )
    metrics: tuple[str, ...] = option(
        "additional metrics for the table, by their names in metrics.jsonl", ()
    )
    out: Path | None = option("where to write the files; default: comparison in the first folder")
    files: bool = option("false: print, but write no files", True)
    markdown: bool = option("true: only print the table as Markdown", False)
    speed: bool = option("true: first measure missing speeds, on this machine", False)
    ship: bool = option("true (track, battery): also write new entries to benchmarks/", False)


def run(arguments: Sequence[str]) -> None:
    """Compare the runs, and print or write the report.

    Raises a UserError for wrong arguments, and if a folder has no finished run.
    """
    args = parse(Arguments, arguments)
    homes = {folder: experiment for experiment, folder in SHIPPED.items()}
    experiment = homes.get(args.folder[0].resolve()) if len(args.folder) == 1 else None
    # Before the slow imports of pandas and scipy, so that mistakes in folders are reported at once.
    runs, skipped = ([], []) if experiment else read_runs(args.folder)
    from gptattn.compare.report import describe_open_sweeps, publish

    still_open = describe_open_sweeps(args.folder)
    for line in still_open:
        print(f"unfinished: {line}", file=sys.stderr)
    if (experiment := experiment or find_experiment(runs)) is not None:
        _report_shipped(args, runs, skipped, experiment)
        return
    if args.ship:
        raise ConfigError("ship", "only applies to runs of the track or the battery; leave it out")

    from gptattn.compare.comparison import compare
    from gptattn.compare.table import all_tables, warning_lines
    from gptattn.sweep.speed import measure_rows

    if args.speed:
        measure_rows(compare(runs, baseline=args.baseline, by=args.by))
        runs, skipped = read_runs(args.folder)
    comparison = compare(
        runs,
        folders=[one_line(str(folder)) for folder in args.folder],
        baseline=args.baseline,
        by=args.by,
        metrics=args.metrics,
        skipped=skipped,
    )
    for line in comparison.skipped:
        print(f"skipped: {line}", file=sys.stderr)
    if args.markdown:
        tables = zip(comparison.sections, all_tables(comparison), strict=True)
        parts = [part for each, table in tables for part in (each.title, table.to_markdown())]
        print(*filter(None, parts), sep="\n\n")
        for line in warning_lines(comparison):
            print(f"warning: {line}", file=sys.stderr)
        return

    first = args.folder[0]
    home = first.absolute().parent if any(run.folder == first for run in runs) else first
    out = (args.out or home / "comparison") if args.files else None
    publish(comparison, out, still_open)


def _report_shipped(
    args: Arguments, runs: Sequence[Run], skipped: Sequence[str], experiment: str
) -> None:
    """Print the attention track or the battery with these runs in it; write its files."""
    from gptattn.build.data import build_data
    from gptattn.compare import battery, track
    from gptattn.compare.report import FILES, write_with_plots
    from gptattn.data.text import cache_folder
    from gptattn.runs.load import count_caches
    from gptattn.settings.compose import settings
    from gptattn.settings.identity import flat, result_settings
    from gptattn.training.fingerprint import FingerprintCache, agrees

    for name in ("baseline", "by", "metrics", "speed"):
        if getattr(args, name):
            raise ConfigError(name, f"does not apply to {experiment}; leave it out")
    for line in skipped:
        print(f"skipped: {line}", file=sys.stderr)
    cache = FingerprintCache(cache_folder(None) / "fingerprints.json")

    def compute(entry: track.StoredEntry) -> list[float]:
        return cache.compute(entry.list_overrides(experiment), entry.name)

    def holds(entry: track.StoredEntry) -> bool:
        return agrees(entry.fingerprint, compute(entry))

    home = SHIPPED[experiment]
    if experiment == "battery":
        own = battery.read_results(runs, count_caches)
        others = track.read_shipped(home, battery.Result)
        tasks = battery.read_tasks(lambda cfg: build_data(cfg).text_hash)
        shown = battery.make_battery([*own, *others], tasks, holds)
        table = battery.battery_table(shown)
    else:
        own = track.read_entries(runs, count_caches)
        others = track.read_shipped(home, track.Entry)
        if own:  # own entries must have the experiment's current settings
            today = flat(asdict(settings([f"experiment={experiment}"])))
            today = track.list_regime(result_settings(today))
            others = [msgspec.structs.replace(one, regime=today | one.regime) for one in others]
        shown = track.make_track(own, others, holds)
        table = track.track_table(shown)
    if args.markdown:
        print(table.to_markdown(), *(f"- {note}" for note in table.notes), sep="\n")
    else:
        table.print(make_console())
    if shown.rows and args.files and not args.markdown and (runs or args.out):
        out = args.out or args.folder[0] / "comparison"
        claim_folder(out, "report", "out", *FILES)
        from gptattn.compare import plots  # imports matplotlib

        if isinstance(shown, track.Track):
            drawn = [plots.draw_track(shown)]
        else:
            losses = track.make_track([], track.read_shipped(SHIPPED["track"], track.Entry))
            drawn = [plots.draw_battery(shown), *plots.draw_recall(shown, losses)]
        print(f"page: {write_with_plots(table, drawn, out)}")
    if args.ship:
        trained = {entry.name for entry in own}
        if isinstance(shown, battery.Battery):  # without unfinished rows, which the notes name
            trained -= {one.name for one in shown.entries if len(one.accuracies) < battery.SEEDS}
        chosen = [
            entry if entry.is_shipped else track.ship(entry, compute(entry), others)
            for entry in shown.entries
            if entry.name in trained
        ]
        track.write_shipped(chosen, home)
        names = ", ".join(dict.fromkeys(entry.name for entry in chosen))
        print(f"shipped to {home}: {names or 'nothing'}")


main = partial(run_script, run, Arguments)
