"""Makes the tables, cells of text plus sentences, for terminal, Markdown, CSV and page."""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import rich.table
from pandas import DataFrame
from rich import box
from rich.console import Console
from rich.text import Text

from gptattn.compare import verdicts
from gptattn.compare.comparison import Comparison, Row, Section, compare
from gptattn.compare.curves import (
    CacheCost,
    PositionLoss,
    cache_costs,
    list_evaluations,
    position_losses,
)
from gptattn.compare.finished_runs import one_line, read_runs
from gptattn.compare.rows import RATE, UNSET, rates_differ
from gptattn.compare.statistics import Difference, Estimate, estimate
from gptattn.machine.template import fill_template
from gptattn.runs.metrics import (
    ACCURACY,
    CACHE,
    DECODING_SPEED,
    DECODING_SPEED_8,
    LOSS,
    MEASURED,
    OF_DATA,
    REPORTED,
    SLICE,
    SOLVED,
    SPEED_RATIO,
    list_slices,
    lowest_accuracy,
)

# Heading, metric and the format of its mean, for all metrics but the loss.
COLUMNS = [(shown[0], metric, shown[1]) for metric, shown in REPORTED.items() if shown][1:]
NAME_WIDTH = 24  # characters; longer names take several lines
HEADING_WIDTH = 16  # a heading takes one line
MISSING = "–"  # noqa: RUF001
CHANGE = "{:+z.4f}".format  # of a loss or a score, `+0.0000` for none
# Columns to drop on a narrow terminal, in this order; the report's files have all columns.
DISPENSABLE = (
    *("time", "cache, 256", "cache, 8,192"),
    "step ms",
    "decode 8 rows",
    "MFLOPs/token",
    "bits/byte",
    "peak MB",
    "95% interval",
    "decode tokens/s",
    "cache B/token",
    "p",
    "params",
    "tokens/s",
    "lr",
)


@dataclass(frozen=True)
class Table:
    """Cells, heading row first, with a title, a caption, verdicts in words, and notes."""

    title: str
    cells: Sequence[Sequence[str]]
    caption: str = ""
    words: Sequence[str] = ()
    notes: Sequence[str] = ()

    def print(self, console: Console) -> None:
        """Print it and its words; drop and name the DISPENSABLE columns that do not fit."""
        columns = list(zip(*self.cells, strict=True))
        slices = [heading for heading in self.cells[0] if heading.startswith("at ")]
        for heading in (*DISPENSABLE, *reversed(slices)):
            first, *others = (max(map(len, column)) + 1 for column in columns)
            if min(first, NAME_WIDTH + 1) + sum(others) + 1 <= console.width:  # the first may wrap
                break
            columns = [column for column in columns if column[0] != heading]
        shown = rich.table.Table(
            title=Text(self.title),
            title_justify="left",
            box=box.SIMPLE_HEAD,
            padding=0,
            caption=Text(self.caption),
            caption_justify="left",
        )
        # Text keeps rich from reading a variant's name as markup.
        name, *figures = (Text(heading) for heading, *_ in columns)
        shown.add_column(name, overflow="fold", max_width=NAME_WIDTH)
        for heading in figures:
            # A name can wrap, but not a figure: part of it would read as another figure.
            shown.add_column(heading, justify="right", no_wrap=True, overflow="fold")
        for row in list(zip(*columns, strict=True))[1:]:
            shown.add_row(*map(Text, row))
        console.print(shown)
        fitting = {column[0] for column in columns}
        out = ", ".join(heading for heading in self.cells[0] if heading not in fitting)
        wider = [f"columns hidden at this width, but in the report's files: {out}"] if out else []
        for line in [*wider, *self.words, *self.notes]:
            console.print(f"- {line}", markup=False)
        console.print()

    def to_markdown(self) -> str:
        """Return the cells as Markdown, without the title and words."""
        heading, *body = ([_escape(cell) for cell in row] for row in self.cells)
        rule = ["---", *["---:"] * (len(heading) - 1)]
        return "\n".join("| " + " | ".join(row) + " |" for row in [heading, rule, *body])

    def to_csv(self) -> str:
        """Return the cells as CSV."""
        heading, *body = self.cells
        return DataFrame(body, columns=[*heading]).to_csv(index=False, lineterminator="\n")


def _escape(cell: str) -> str:
    """Escape characters that could end a cell or begin an HTML tag."""
    return cell.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")


def report_rows(section: Section) -> list[list[str]]:
    """Return the cells of the report's table, heading row first.

    If each variant has its own learning rate, `lr` is a column; on a task, so is `solved`, the
    share of runs. Metrics that exist only for other kinds of data are left out.
    """
    rates = rates_differ([row.runs[0] for row in section.rows])
    recorded = dict.fromkeys(metric for row in section.rows for metric in row.metrics)
    columns = [column for column in COLUMNS if column[1] in recorded or column[1] not in OF_DATA]
    slices = list_slices(recorded)
    columns[1:1] = [(f"at {one.removeprefix(SLICE)}", one, "{:.4f}".format) for one in slices]
    others = (metric for metric in recorded if metric not in {*REPORTED, *slices})
    columns += [(metric, metric, "{:.4g}".format) for metric in others]
    versus = f"vs {section.baseline}"
    versus = versus if len(versus) <= HEADING_WIDTH else "vs baseline"
    task = ACCURACY in recorded
    headings = ["variant", "n", *["lr"] * rates, "val loss", versus, "95% interval", "p"]
    headings += ["solved"] * task
    cells = [[*headings, *(heading for heading, _, _ in columns)]]
    for row in section.rows:
        lr = [row.runs[0].settings.get(RATE, UNSET)] * rates
        loss = [mean_cell(row.metrics[LOSS]), *difference_cells(row.difference)]
        solved = sum((lowest_accuracy(run.metrics) or 0) >= SOLVED for run in row.runs)
        loss += [f"{solved}/{row.n}"] * task
        means = [_cost_cell(row, metric, form) for _, metric, form in columns]
        cells.append([row.name, str(row.n), *lr, *loss, *means])
    for d in section.interactions:
        start = [f"{d.variant}, beyond the sum", str(d.n), *[""] * rates, MISSING]
        cells.append([*start, *difference_cells(d), *[MISSING] * (len(columns) + task)])
    return cells


def _cost_cell(row: Row, metric: str, form: Callable[[float], str]) -> str:
    if (estimate := row.metrics.get(metric)) is not None:
        mean, low, high = map(form, (estimate.mean, *(estimate.interval or (0.0, 0.0))))
        return f"{mean} ({low} to {high})" if metric == SPEED_RATIO else mean
    of_cache = metric in (CACHE, DECODING_SPEED, DECODING_SPEED_8)
    uncached = of_cache and all(run.uncached for run in row.runs)
    return "no cache" if uncached else MISSING


def mean_cell(estimate: Estimate | None, form: Callable[[float], str] = "{:.4f}".format) -> str:
    """Return the mean ± half of its interval's width: `2.0150 ± 0.0158`."""
    if estimate is None:
        return MISSING
    if estimate.interval is None:
        return form(estimate.mean)
    low, high = estimate.interval
    return f"{form(estimate.mean)} ± {(high - low) / 2:.4f}"


def difference_cells(d: Difference | None) -> list[str]:
    """Return a difference, its interval and its p as cells."""
    if d is None:
        return [MISSING] * 3
    if d.interval is None or d.p is None:
        return [verdicts.signed(d.mean), MISSING, MISSING]
    interval = f"{verdicts.signed(d.interval[0])} to {verdicts.signed(d.interval[1])}"
    p = verdicts.p_value(d.p).removeprefix("p ").removeprefix("= ")
    return [verdicts.signed(d.mean), interval, p]


def section_table(section: Section, title: str = "") -> Table:
    """Return the section's table with the verdicts in words."""
    most = max((row.difference.comparisons for row in section.rows if row.difference), default=0)
    corrected = f", interval and p Bonferroni-corrected for {most} comparisons" if most > 1 else ""
    caption = (
        "means over seeds; val loss ± half of its 95% confidence interval; "
        f"vs {section.baseline}: paired difference by seed{corrected}"
    )
    if section.interactions:
        caption += "; beyond the sum: also paired, corrected for the number of such rows"
    notes = [*verdicts.match_words(section), *verdicts.seed_notes(section)]
    notes += [*verdicts.length_notes(section), *section.notes]
    cells = report_rows(section)
    return Table(section.title or title, cells, caption, verdicts.section_words(section), notes)


def evaluation_tables(section: Section) -> list[Table]:
    """Return up to three tables of the section's evaluations: positions, caches and tasks."""
    positions, caches = position_losses(section), cache_costs(section)
    tables = [_position_table(positions), _cache_table(caches), _task_table(section)]
    return [table for table in tables if len(table.cells) > 1]


def _position_table(losses: Sequence[PositionLoss]) -> Table:
    names = list(dict.fromkeys(one.variant for one in losses))
    counts = {name: max(one.loss.n for one in losses if one.variant == name) for name in names}
    columns: dict[str, dict[str, str]] = {"n": {name: str(n) for name, n in counts.items()}}
    for one in sorted(losses, key=lambda one: one.length):
        columns.setdefault(f"{one.length:,}", {})[one.variant] = mean_cell(one.loss)
        if one.beyond:
            beyond = columns.setdefault(f"{one.length:,}, beyond {one.trained:,}", {})
            beyond[one.variant] = mean_cell(one.beyond)
    table = DataFrame(columns, index=names).fillna(MISSING)
    cells = [["variant", *table.columns], *table.reset_index().to_numpy().tolist()]
    caption = (
        "Mean loss in nats over whole windows of each length, ± half of its 95% interval over "
        "seeds, and the same beyond the trained length. Each length splits the text differently."
    )
    return Table("Loss by length of context", cells, caption)


def _cache_table(costs: Sequence[CacheCost]) -> Table:
    full = {one.variant: one.bytes_per_token for one in costs if one.change is None}
    cells = [["variant", "cache", "n", "bytes/token", "of full", "val loss", "change from full"]]
    for one in costs:
        size, of_full = one.bytes_per_token, one.bytes_per_token / full[one.variant]
        figures = [str(one.loss.n), f"{size:,.6g}", f"{of_full:.1%}", mean_cell(one.loss)]
        cells.append([one.variant, one.cache, *figures, mean_cell(one.change, CHANGE)])
    caption = (
        "The same weights decoded through cheaper caches in float32, and the change from the same "
        "run's full cache; ± half of the 95% interval over seeds."
    )
    return Table("Loss by cache", cells, caption)


def _task_table(section: Section) -> Table:
    tasks_of = {row.name: [one.tasks for one in list_evaluations(row)] for row in section.rows}
    heading = ["variant", "task", "metric", "shots", "n", "score", "std error"]
    cells = [[*heading, f"vs {section.baseline}", "lm_eval"]]
    for name, runs in tasks_of.items():
        for task, first in {task: one for run in runs for task, one in run.items()}.items():
            own, base = (
                [run[task] for run in some if task in run and run[task].digest == first.digest]
                for some in (runs, tasks_of[section.baseline])
            )
            for metric in first.values:
                score = estimate([one.values[metric] for one in own]).mean
                errors = [one.errors[metric] for one in own if metric in one.errors]
                change = None
                if name != section.baseline and base and metric in first.items:
                    mine, other = ([x.items[metric] for x in some] for some in (own, base))
                    change = estimate(np.mean(mine, axis=0) - np.mean(other, axis=0))
                error = f"{estimate(errors).mean:.4f}" if errors else MISSING
                shots = MISSING if first.shots is None else str(first.shots)
                names = [name, one_line(task), one_line(metric), shots, str(len(own))]
                shown = [f"{score:.4f}", error, mean_cell(change, CHANGE), first.harness]
                cells.append([*names, *shown])
    caption = (
        "Scores by lm-evaluation-harness: means over n seeds, with the mean standard error over "
        f"items. vs {section.baseline}: mean difference on the same items, ± half of its 95% "
        "interval over items, not over seeds."
    )
    return Table("Scores on tasks", cells, caption)


class Report(Comparison):
    """A comparison that prints like the command does and shows as tables in a notebook."""

    def __repr__(self) -> str:
        console = Console(file=io.StringIO(), highlight=False, markup=False, emoji=False)
        with console.capture() as shown:
            print_tables(self, console)
        warnings = [f"warning: {line}" for line in warning_lines(self)]
        return "\n".join([shown.get().rstrip(), *warnings])

    def _repr_html_(self) -> str:
        return fill_template("gptattn.compare", "tables.html.j2", tables=all_tables(self))


def load_comparison(
    *folders: str | Path,
    baseline: str | None = None,
    by: Sequence[str] = (),
    metrics: Sequence[str] = (),
) -> Report:
    """Return the comparison of the finished runs in these folders, by default in `outputs`.

    `gptattn.compare(...)` is this; arguments as in the command. Raises DataError if there is no
    finished run, ConfigError for an unknown baseline, setting or metric.
    """
    paths = [str(folder) for folder in folders] or ["outputs"]
    runs, skipped = read_runs(paths)
    found = compare(runs, folders=paths, baseline=baseline, by=by, metrics=metrics, skipped=skipped)
    return Report(**vars(found))


def load_runs(*folders: str | Path) -> DataFrame:
    """Return a pandas DataFrame with one row per finished run at or below the folders.

    Its columns are folder, variant, seed, budget, steps and code; then the run's metrics, named as
    in its record (`val/loss`, `cost/params`), the speeds of its variant, as in a report
    (`speed/tokens_per_s`, and `speed/ratio` to the baseline with its interval in `speed/ratio low`
    and `high`), and its settings (`model.d_model`, as text). Missing values are NaN.
    `attrs["skipped"]` has a line per skipped folder. Raises DataError if a path is not a folder or
    no finished run is found.
    """
    runs, skipped = read_runs(folders)
    compared = compare(runs)
    speeds = compared.table().filter(like="speed/").dropna(axis="columns", how="all")
    rows = [row for section in compared.sections for row in section.rows]
    lines = zip(rows, speeds.to_dict("records"), strict=True)
    speeds_of = {run.folder: own for row, own in lines for run in row.runs}
    frame = DataFrame(
        {
            "folder": str(run.folder),
            "variant": run.variant,
            "seed": run.seed,
            "budget": run.settings["budget"],
            "steps": run.steps,
            "code": run.code,
            **{metric: value for metric, value in run.metrics.items() if metric not in MEASURED},
            **speeds_of.get(run.folder, {}),
            **run.settings,
        }
        for run in runs
    )
    frame.attrs["skipped"] = skipped
    return frame


def all_tables(comparison: Comparison) -> list[Table]:
    """Return the table of each section."""
    whole = _whole(comparison)
    return [section_table(section, whole) for section in comparison.sections]


def _whole(comparison: Comparison) -> str:
    return f"{' '.join(comparison.folders)}: {verdicts.headline(comparison)}"


def warning_lines(comparison: Comparison) -> list[str]:
    """Return the warnings of all sections and of the whole comparison, without repeats."""
    lines = [line for section in comparison.sections for line in section.warnings]
    return list(dict.fromkeys([*lines, *comparison.warnings]))


def print_tables(comparison: Comparison, console: Console) -> None:
    """Print each table with its verdicts and notes."""
    if len(comparison.sections) > 1:
        console.print(f"{_whole(comparison)}\n", markup=False)
    for table in all_tables(comparison):
        table.print(console)
