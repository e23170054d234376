"""Makes the comparison's tables: for the terminal, for Markdown, and the cells of the page."""

from collections.abc import Collection, Sequence
from statistics import mean

from rich import box
from rich.table import Table
from rich.text import Text

from gptattn.compare.finished_runs import Run
from gptattn.compare.groups import group_runs, rates_differ
from gptattn.compare.results import OF_DATA, Difference, Row, Section
from gptattn.compare.setting_words import RATE, UNSET
from gptattn.compare.statistics import Interval, t_interval
from gptattn.compare.verdicts import p_value, signed

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


def rows(runs: Sequence[Run]) -> list[list[str]]:
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
    """Return the columns for rows with these metrics, without those that other data has."""
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
    return cells_table(rows(runs), title, width, PLUS_MINUS)


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
        # A long name may wrap. A figure must not: a part of it would read as another figure.
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
