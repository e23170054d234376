"""Makes the tables, as cells of text with a heading row first, for terminal, Markdown and page."""

import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from statistics import mean

from rich import box
from rich.table import Table
from rich.text import Text

from gptattn.compare.comparison import OF_DATA, Across, Comparison, Row, Section
from gptattn.compare.curves import CacheCost, PositionLoss, cache_costs, position_losses
from gptattn.compare.differences import RATE, UNSET
from gptattn.compare.finished_runs import Run
from gptattn.compare.groups import group_runs, rates_differ
from gptattn.compare.ladder import LadderReport, Multiplier
from gptattn.compare.statistics import Difference, Estimate, Interval, t_interval
from gptattn.compare.verdicts import (
    across_notes,
    across_title,
    across_words,
    headline,
    ladder_notes,
    ladder_times,
    ladder_title,
    ladder_words,
    match_words,
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
MAX_SENTENCES = 20  # about single variants, printed for each section
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


def short_rows(runs: Sequence[Run]) -> list[list[str]]:
    """Return the cells of the short table, heading row first: means only, no comparison."""
    columns = _columns([run.metrics for run in runs])
    cells = [["variant", "seeds", *(heading for heading, *_ in columns)]]
    for name, members in group_runs(runs).items():
        row = [name, str(len(members))]
        for _, metric, form in columns:
            values = [m.metrics[metric] for m in members if metric in m.metrics]
            cell = _number(mean(values), metric, form) if values else MISSING
            if metric == "val/loss":
                cell += half_interval(t_interval(values), form)
            row.append(cell)
        cells.append(row)
    return cells


def _columns(found: Sequence[Collection[str]]) -> list[Column]:
    """Return the columns for rows with these metrics, without those of other kinds of data."""
    known = set().union(*found)
    return [column for column in COLUMNS if column[1] in known or column[1] not in OF_DATA]


def report_rows(section: Section) -> list[list[str]]:
    """Return the cells of the report's table, heading row first.

    If each variant has its own learning rate, that is a column.
    """
    versus = f"vs {section.baseline}"
    versus = versus if len(versus) <= HEADING_WIDTH else "vs baseline"
    difference = [versus, "95% interval", "p"]
    columns = _columns([row.metrics for row in section.rows])
    heading, *others = (heading for heading, *_ in columns)
    rates = rates_differ({row.name: row.runs for row in section.rows})
    cells = [["variant", "n", *["lr"] * rates, heading, *difference, *others]]
    for row in section.rows:
        loss, *rest = (_estimate(row, metric, form) for _, metric, form in columns)
        lr = [row.runs[0].settings.get(RATE, UNSET)] * rates
        cells.append([row.name, str(row.n), *lr, loss, *difference_cells(row.difference), *rest])
    return cells


def _number(value: float, metric: str, form: str) -> str:
    return format(value * SCALE.get(metric, 1), form)


def _estimate(row: Row, metric: str, form: str) -> str:
    if metric not in row.metrics:
        return MISSING
    estimate = row.metrics[metric]
    cell = _number(estimate.mean, metric, form)
    return cell + half_interval(estimate.interval, form) if metric == "val/loss" else cell


def half_interval(interval: Interval | None, form: str) -> str:
    """Format half of the interval's width, ` ± 0.0158`; "" for a single run."""
    return "" if interval is None else f" ± {(interval[1] - interval[0]) / 2:{form}}"


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


def report_table(section: Section, title: str, width: int) -> Table:
    """Return the report's table for a terminal, at most `width` characters."""
    caption = f"{PLUS_MINUS}; vs {section.baseline}: paired difference by seed{_corrected(section)}"
    return cells_table(report_rows(section), title, width, caption)


def _corrected(section: Section) -> str:
    """Return `, interval and p corrected for 3 comparisons`; "" for one."""
    most = max((row.difference.comparisons for row in section.rows if row.difference), default=0)
    return f", interval and p Bonferroni-corrected for {most} comparisons" if most > 1 else ""


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


@dataclass(frozen=True)
class TitledTable:
    """Cells, heading row first, with title, words and caption."""

    title: str
    cells: Sequence[Sequence[str]]
    caption: str
    words: Sequence[str] = field(default_factory=list)
    notes: Sequence[str] = field(default_factory=list)


def tables_across(comparison: Comparison) -> list[TitledTable]:
    """Return the tables that span several sections: ladders, then changes."""
    return [
        *(
            TitledTable(
                ladder_title(each),
                _ladder_cells(each),
                _ladder_caption(each),
                ladder_words(each),
                ladder_notes(each),
            )
            for each in comparison.ladders
        ),
        *(
            TitledTable(
                across_title(each),
                _across_cells(each),
                _across_caption(each),
                across_words(each),
                across_notes(each),
            )
            for each in comparison.across
        ),
    ]


def _ladder_cells(report: LadderReport) -> list[list[str]]:
    """Return the cells of the table, heading row first: multipliers, and the prediction."""
    compute = report.costs[0]
    costs = [scaled.cost for scaled in report.costs]
    table = [["variant", *costs, "predicted", "measured", "error"]]
    for name, measured in compute.measured.items():
        times = [
            _multiplier_cell(scaled.multipliers[name]) if name in scaled.multipliers else MISSING
            for scaled in report.costs
        ]
        predicted = compute.predicted[name]
        figures = [f"{predicted:.4f}", f"{measured:.4f}", f"{predicted - measured:+.4f}"]
        table.append([name, *times, *figures])
    return table


def _multiplier_cell(found: Multiplier) -> str:
    return ladder_times(found).removesuffix(" times")


def _ladder_caption(report: LadderReport) -> str:
    """Explain the columns."""
    return (
        f"times what {report.baseline} needs for the same loss, 95% intervals for each cost over "
        "its variants; predicted: the loss at the largest size, from the smaller ones"
    )


def _across_cells(across: Across) -> list[list[str]]:
    """Return the cells of the table, heading row first."""
    first, second = (
        words if len(words) <= HEADING_WIDTH else place
        for words, place in ((across.first, "from"), (across.second, "to"))
    )
    tests = ["95% interval", "p"]
    versus = [_versus(across), *tests] if across.gaps else []
    table = [["variant", "n", first, second, "change", *tests, *versus]]
    for name, loss in across.losses.items():
        gap = across.gaps.get(name)
        figures = [f"{loss.first:.4f}", f"{loss.second:.4f}"]
        differences = difference_cells(loss.difference)
        if across.gaps:
            differences += difference_cells(gap.difference) if gap else [MISSING] * 3
        table.append([name, f"{loss.difference.n}", *figures, *differences])
    return table


def _versus(across: Across) -> str:
    """Return the heading of a change minus the baseline's: `minus mha's`."""
    words = f"minus {across.baseline}'s"
    return words if len(words) <= HEADING_WIDTH else "minus baseline's"


def _across_caption(across: Across) -> str:
    """Return the table's caption."""
    losses, gaps = (
        max((change.difference.comparisons for change in changes.values()), default=0)
        for changes in (across.losses, across.gaps)
    )
    base, versus = across.baseline, _versus(across)
    what = "losses" if across.metric == "val/loss" else "bits per byte"
    lines = [f"mean {what} over the n seeds in common", "change: paired difference by seed"]
    if across.gaps:
        change = f"the change less that of {base}, so the change of the difference to {base}"
        lines.append(f"{versus}: {change}")
    if losses:  # more than a single seed
        apart = f" and, apart from them, over {gaps} {versus}" if gaps else ""
        count = f"{losses} change{'s' * (losses > 1)}"
        lines.append(f"intervals and p Bonferroni-corrected over {count}{apart}")
    return "; ".join(lines)


def evaluation_tables(section: Section) -> list[TitledTable]:
    """Return the tables of the section's evaluations: up to two."""
    positions, caches = position_losses(section), cache_costs(section)
    return [
        *([_positions(positions)] if positions else []),
        *([_caches(caches)] if caches else []),
    ]


def _positions(losses: list[PositionLoss]) -> TitledTable:
    lengths = sorted({(one.length, one.trained) for one in losses})
    heading = ["variant", "n"]
    for length, trained in lengths:
        heading += [f"{length:,}", *[f"{length:,}, beyond {trained:,}"] * (length > trained)]
    by_row: dict[str, dict[int, PositionLoss]] = {}
    for one in losses:
        by_row.setdefault(one.variant, {})[one.length] = one
    body = []
    for name, found in by_row.items():
        cells = [name, str(max(one.loss.n for one in found.values()))]
        for length, trained in lengths:
            one = found.get(length)
            cells.append(_shown(one and one.loss))
            if length > trained:
                cells.append(f"{one.beyond.mean:.4f}" if one and one.beyond else MISSING)
        body.append(cells)
    caption = (
        "Mean loss in nats over all positions of whole windows of this length, ± half of its "
        "95% confidence interval over seeds, and the mean of those with more context than in "
        "training. Windows of different lengths are cut from the same text at different places."
    )
    return TitledTable("Loss by length of context", [heading, *body], caption)


def _caches(costs: list[CacheCost]) -> TitledTable:
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
            MISSING if one.change is None else _shown(one.change, change_words),
        ]
        for one in costs
    ]
    caption = (
        "The same weights decoded through cheaper caches. Changes are to the full cache of the "
        "same run, in float32; ± half of the 95% confidence interval over seeds."
    )
    return TitledTable("Loss by cache", [heading, *body], caption)


def _shown(estimate: Estimate | None, words: Callable[[float], str] = "{:.4f}".format) -> str:
    if estimate is None:
        return MISSING
    return words(estimate.mean) + half_interval(estimate.interval, ".4f")


def change_words(change: float) -> str:
    """Format a change of the loss with four decimals and its sign, `+0.0000` for none."""
    return f"{round(change, 4) + 0.0:+.4f}"


def show(comparison: Comparison) -> None:
    """Print each section's table and verdicts; warnings go to stderr."""
    console = StdoutConsole(highlight=False, markup=False, emoji=False)
    whole = f"{' '.join(comparison.folders)}: {headline(comparison)}"
    if len(comparison.sections) > 1:
        console.print(f"{whole}\n")
    for section in comparison.sections:
        console.print(report_table(section, section.title or whole, console.width))
        *words, last = section_words(section)
        left_out = (
            [f"({len(words) - MAX_SENTENCES} more are on the page)"]
            if len(words) > MAX_SENTENCES
            else []
        )
        for line in [
            *words[:MAX_SENTENCES],
            *left_out,
            last,
            *match_words(section)[:MAX_SENTENCES],
            *sure_words(section),
        ]:
            console.print(f"- {line}")
        console.print()
    for part in tables_across(comparison):
        console.print(cells_table(part.cells, part.title, console.width, part.caption))
        for line in [*part.words, *part.notes]:
            console.print(f"- {line}")
        console.print()
    lines = [line for section in comparison.sections for line in section.warnings]
    for line in dict.fromkeys([*lines, *comparison.warnings]):
        print(f"warning: {line}", file=sys.stderr)
