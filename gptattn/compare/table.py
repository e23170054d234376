"""Makes the tables, as cells of text with a heading row first, for terminal, Markdown and page."""

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rich import box
from rich.table import Table
from rich.text import Text

from gptattn.compare.comparison import (
    OF_DATA,
    Across,
    Comparison,
    Section,
    estimate_metrics,
)
from gptattn.compare.curves import CacheCost, PositionLoss, cache_costs, position_losses
from gptattn.compare.differences import RATE, UNSET
from gptattn.compare.finished_runs import Run
from gptattn.compare.groups import group_runs, rates_differ
from gptattn.compare.ladder import LadderReport
from gptattn.compare.statistics import Difference, Estimate
from gptattn.compare.verdicts import (
    across_notes,
    across_title,
    across_words,
    headline,
    ladder_notes,
    ladder_title,
    ladder_words,
    match_words,
    multiplier_words,
    p_value,
    section_words,
    signed,
    sure_words,
)
from gptattn.machine.console import StdoutConsole

# Heading, metric, format of the mean.
Column = tuple[str, str, str]
COLUMNS: tuple[Column, ...] = (
    ("val loss", "val/loss", ".4f"),
    ("accuracy", "val/accuracy", ".4f"),
    ("bits/byte", "val/bits_per_byte", ".3f"),
    ("tokens/s", "perf/tokens_per_s", ",.0f"),
    ("step ms", "perf/step_ms", ",.1f"),
    ("params", "cost/params", ",.0f"),
    ("MFLOPs/token", "cost/flops_per_token", ",.2f"),
    ("cache B/token", "cost/kv_bytes_per_token", ",.0f"),
    ("peak MB", "perf/peak_memory_training_mb", ",.0f"),
)
NAME_WIDTH = 24  # characters; longer names take several lines
HEADING_WIDTH = 16  # a heading takes one line
SCALE = {"cost/flops_per_token": 1e-6}
PLUS_MINUS = "means over seeds; val loss ± half of its 95% confidence interval"
MISSING = "–"  # noqa: RUF001
# Columns to drop on a narrow terminal, in this order; the report's files have all columns.
DISPENSABLE = (
    "total tokens",
    "step ms",
    "MFLOPs/token",
    "bits/byte",
    "peak MB",
    "95% interval",
    "params",
    "cache B/token",
    "tokens/s",
    "p",
    "lr",
)


@dataclass(frozen=True)
class TitledTable:
    """Cells, heading row first, with title, words and caption."""

    title: str
    cells: Sequence[Sequence[str]]
    caption: str
    words: Sequence[str] = field(default_factory=list)
    notes: Sequence[str] = field(default_factory=list)


def short_rows(runs: Sequence[Run]) -> list[list[str]]:
    """Return the cells of the short table, heading row first: means only, no comparison."""
    groups = group_runs(runs)
    means = {name: estimate_metrics(members) for name, members in groups.items()}
    columns = _columns(means.values())
    return [
        ["variant", "seeds", *(heading for heading, *_ in columns)],
        *([name, str(len(groups[name])), *_cells(own, columns)] for name, own in means.items()),
    ]


def report_rows(section: Section) -> list[list[str]]:
    """Return the cells of the report's table, heading row first.

    If each variant has its own learning rate, that is a column.
    """
    columns = _columns([row.metrics for row in section.rows])
    heading, *others = (heading for heading, *_ in columns)
    rates = rates_differ(section.groups)
    versus = _fitting_heading(f"vs {section.baseline}", "vs baseline")
    cells = [["variant", "n", *["lr"] * rates, heading, versus, "95% interval", "p", *others]]
    for row in section.rows:
        loss, *rest = _cells(row.metrics, columns)
        lr = [row.runs[0].settings.get(RATE, UNSET)] * rates
        cells.append([row.name, str(row.n), *lr, loss, *difference_cells(row.difference), *rest])
    return cells


def _columns(found: Iterable[Collection[str]]) -> list[Column]:
    """Return the columns for rows with these metrics, without those of other kinds of data."""
    known = set().union(*found)
    return [column for column in COLUMNS if column[1] in known or column[1] not in OF_DATA]


def _cells(metrics: Mapping[str, Estimate], columns: Sequence[Column]) -> list[str]:
    """Return a row's means, the loss with half of its interval."""
    cells = []
    for _, metric, form in columns:
        found = metrics.get(metric)
        cell = format(found.mean * SCALE.get(metric, 1), form) if found else MISSING
        cells.append(cell + half_interval(found, form) if metric == "val/loss" else cell)
    return cells


def _fitting_heading(words: str, short: str) -> str:
    return words if len(words) <= HEADING_WIDTH else short


def half_interval(estimate: Estimate | None, form: str = ".4f") -> str:
    """Format half of the interval's width, ` ± 0.0158`; "" without one."""
    if estimate is None or estimate.interval is None:
        return ""
    return f" ± {(estimate.interval[1] - estimate.interval[0]) / 2:{form}}"


def difference_cells(d: Difference | None) -> list[str]:
    """Return a difference, its interval and its p, as cells."""
    if d is None:
        return [MISSING] * 3
    if d.interval is None or d.p is None:
        return [signed(d.mean), MISSING, MISSING]
    interval = f"{signed(d.interval[0])} to {signed(d.interval[1])}"
    return [signed(d.mean), interval, p_value(d.p).removeprefix("p ").removeprefix("= ")]


def terminal_table(runs: Sequence[Run], title: str, width: int) -> Table:
    """Return the short table of the runs at the end of a sweep, at most `width` characters."""
    return cells_table(short_rows(runs), title, width, PLUS_MINUS)


def section_table(section: Section, title: str = "") -> TitledTable:
    """Return the section's table, with what its runs show in words."""
    most = max((row.difference.comparisons for row in section.rows if row.difference), default=0)
    corrected = f", interval and p Bonferroni-corrected for {most} comparisons" if most > 1 else ""
    caption = f"{PLUS_MINUS}; vs {section.baseline}: paired difference by seed{corrected}"
    words, notes = section_words(section), [*match_words(section), *sure_words(section)]
    return TitledTable(section.title or title, report_rows(section), caption, words, notes)


def cells_table(cells: Sequence[Sequence[str]], title: str, width: int, caption: str = "") -> Table:
    """Return the cells, heading row first, as a terminal table of at most `width` characters.

    Columns in DISPENSABLE are dropped until the rest fits.
    """
    table = Table(
        title=Text(title),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
        caption=Text(caption),
        caption_justify="left",
    )
    shown = _fitting(cells, width)
    for i in shown:
        # A long name may wrap, but not a figure: part of it would read as another figure.
        table.add_column(
            Text(cells[0][i]),
            justify="right" if i else "left",
            no_wrap=bool(i),
            overflow="fold",
            max_width=None if i else NAME_WIDTH,
        )
    for row in cells[1:]:
        # Text keeps rich from reading a variant's name as markup.
        table.add_row(*(Text(row[i]) for i in shown))
    return table


def _fitting(cells: Sequence[Sequence[str]], width: int) -> list[int]:
    """Return the indices of the columns to show in `width` characters."""
    widths = [max(len(row[i]) for row in cells) + 1 for i in range(len(cells[0]))]
    widths[0] = min(widths[0], NAME_WIDTH + 1)
    shown = list(range(len(widths)))
    for heading in DISPENSABLE:
        if sum(widths[i] for i in shown) + 1 <= width:
            break
        shown = [i for i in shown if cells[0][i] != heading]
    return shown


def markdown_table(cells: Sequence[Sequence[str]]) -> str:
    """Return the cells, heading row first, as a Markdown table."""
    heading, *body = ([_escaped(cell) for cell in row] for row in cells)
    rule = ["---", *["---:"] * (len(heading) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in [heading, rule, *body])


def _escaped(cell: str) -> str:
    """Escape what could end a cell or begin an HTML tag."""
    return cell.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")


def tables_across(comparison: Comparison) -> list[TitledTable]:
    """Return the tables that span several sections: ladders, then changes."""
    return [*map(_ladder_table, comparison.ladders), *map(_across_table, comparison.across)]


def _ladder_table(report: LadderReport) -> TitledTable:
    """Return what each variant needs of each cost, and how well the largest size was predicted."""
    compute = report.costs[0]
    costs = [scaled.cost for scaled in report.costs]
    cells = [["variant", *costs, "predicted", "measured", "error"]]
    for name, measured in compute.measured.items():
        times = [
            multiplier_words(scaled.multipliers[name]) if name in scaled.multipliers else MISSING
            for scaled in report.costs
        ]
        predicted = compute.predicted[name]
        figures = [f"{predicted:.4f}", f"{measured:.4f}", f"{predicted - measured:+.4f}"]
        cells.append([name, *times, *figures])
    caption = (
        f"times what {report.baseline} needs for the same loss, 95% intervals for each cost over "
        "its variants; predicted: the loss at the largest size, from the smaller ones"
    )
    return TitledTable(
        ladder_title(report), cells, caption, ladder_words(report), ladder_notes(report)
    )


def _across_table(across: Across) -> TitledTable:
    """Return the losses of two sections and their changes, alone and less the baseline's."""
    first = _fitting_heading(across.first, "from")
    second = _fitting_heading(across.second, "to")
    versus = _fitting_heading(f"minus {across.baseline}'s", "minus baseline's")
    gaps, tests = bool(across.gaps), ["95% interval", "p"]
    cells = [["variant", "n", first, second, "change", *tests, *[versus, *tests] * gaps]]
    for name, loss in across.losses.items():
        gap = across.gaps.get(name)
        figures = [f"{loss.first:.4f}", f"{loss.second:.4f}", *difference_cells(loss.difference)]
        figures += difference_cells(gap and gap.difference) * gaps
        cells.append([name, f"{loss.difference.n}", *figures])
    what = "losses" if across.metric == "val/loss" else "bits per byte"
    lines = [f"mean {what} over the n seeds in common", "change: paired difference by seed"]
    base = across.baseline
    if gaps:
        change = f"the change less that of {base}, so the change of the difference to {base}"
        lines.append(f"{versus}: {change}")
    changes, families = (
        max((change.difference.comparisons for change in family.values()), default=0)
        for family in (across.losses, across.gaps)
    )
    if changes:  # more than a single seed
        apart = f" and, apart from them, over {families} {versus}" if families else ""
        count = f"{changes} change{'s' * (changes > 1)}"
        lines.append(f"intervals and p Bonferroni-corrected over {count}{apart}")
    return TitledTable(
        across_title(across), cells, "; ".join(lines), across_words(across), across_notes(across)
    )


def evaluation_tables(section: Section) -> list[TitledTable]:
    """Return the tables of the section's evaluations: up to two."""
    positions, caches = position_losses(section), cache_costs(section)
    return [
        *([_positions(positions)] if positions else []),
        *([_caches(caches)] if caches else []),
    ]


def _positions(losses: Sequence[PositionLoss]) -> TitledTable:
    lengths = sorted({(one.length, one.trained) for one in losses})
    found = {(one.variant, one.length): one for one in losses}
    heading = ["variant", "n"]
    for length, trained in lengths:
        heading += [f"{length:,}", *[f"{length:,}, beyond {trained:,}"] * (length > trained)]
    body = []
    for name in dict.fromkeys(one.variant for one in losses):
        cells = [name, str(max(one.loss.n for one in losses if one.variant == name))]
        for length, trained in lengths:
            one = found.get((name, length))
            cells.append(_shown(one and one.loss))
            cells += [_shown(one and one.beyond)] * (length > trained)
        body.append(cells)
    caption = (
        "Mean loss in nats over all positions of whole windows of this length, ± half of its "
        "95% confidence interval over seeds, and the same of those with more context than in "
        "training. Windows of different lengths are cut from the same text at different places."
    )
    return TitledTable("Loss by length of context", [heading, *body], caption)


def _caches(costs: Sequence[CacheCost]) -> TitledTable:
    heading = ["variant", "cache", "n", "bytes/token", "of full", "val loss", "change from full"]
    full = {one.variant: one.bytes_per_token for one in costs if one.change is None}
    body = [
        [
            one.variant,
            one.cache,
            str(one.loss.n),
            f"{one.bytes_per_token:,.6g}",
            f"{one.bytes_per_token / full[one.variant]:.1%}",
            _shown(one.loss),
            _shown(one.change, change_words),
        ]
        for one in costs
    ]
    caption = (
        "The same weights decoded through cheaper caches. Changes are to the full cache of the "
        "same run, in float32; ± half of the 95% confidence interval over seeds."
    )
    return TitledTable("Loss by cache", [heading, *body], caption)


def _shown(estimate: Estimate | None, words: Callable[[float], str] = "{:.4f}".format) -> str:
    return words(estimate.mean) + half_interval(estimate) if estimate else MISSING


def change_words(change: float) -> str:
    """Format a change of the loss with four decimals and its sign, `+0.0000` for none."""
    return f"{round(change, 4) + 0.0:+.4f}"


def show(comparison: Comparison) -> None:
    """Print each table with its words; warnings go to stderr."""
    console = StdoutConsole(highlight=False, markup=False, emoji=False)
    whole = f"{' '.join(comparison.folders)}: {headline(comparison)}"
    if len(comparison.sections) > 1:
        console.print(f"{whole}\n")
    tables = [section_table(section, whole) for section in comparison.sections]
    for table in [*tables, *tables_across(comparison)]:
        console.print(cells_table(table.cells, table.title, console.width, table.caption))
        for line in [*table.words, *table.notes]:
            console.print(f"- {line}")
        console.print()
    lines = [line for section in comparison.sections for line in section.warnings]
    for line in dict.fromkeys([*lines, *comparison.warnings]):
        print(f"warning: {line}", file=sys.stderr)
