"""Runs grouped over seeds, one row per variant, on a terminal or in Markdown."""

from collections.abc import Sequence
from statistics import mean, stdev

from rich import box
from rich.table import Table

from gptattn.compare.runs import Run

# Heading, metric, format of the mean; the spread over seeds is shown where it means something.
Column = tuple[str, str, str, bool]
COLUMNS: tuple[Column, ...] = (
    ("val loss", "val/loss", ".4f", True),
    ("bits/byte", "val/bits_per_byte", ".3f", False),
    ("tokens/s", "perf/tokens_per_s", ",.0f", False),
    ("params", "cost/params", ",.0f", False),
    ("in attention", "cost/params_attention", ",.0f", False),
    ("MFLOPs/token", "cost/flops_per_token", ",.2f", False),
    ("cache B/token", "cost/kv_bytes_per_token", ",.0f", False),
    ("peak MB", "perf/peak_memory_mb", ",.0f", False),
)
WIDE = 110
WIDE_ONLY = {"val/bits_per_byte", "cost/params_attention", "cost/flops_per_token"}
SCALE = {"cost/flops_per_token": 1e-6}


def group_runs(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs that differ in nothing but the seed, under the shortest name that tells them apart.

    The name is the variant; where several groups share it, the settings they differ in follow.
    Of several runs with one seed the last one counts: a repeat is no further sample.
    """
    groups: dict[tuple[tuple[str, str], ...], list[Run]] = {}
    for run in runs:
        key = (("", run.variant), *sorted(run.settings.items()))
        groups.setdefault(key, []).append(run)
    named: dict[str, list[Run]] = {}
    for key, members in groups.items():
        variant = members[0].variant
        rivals = [dict(k) for k, m in groups.items() if m[0].variant == variant]
        differing = [f"{n}={v[:20]}" for n, v in key if len({r.get(n) for r in rivals}) > 1]
        named[" ".join([variant, *differing])] = list({run.seed: run for run in members}.values())
    return named


def rows(runs: Sequence[Run], columns: Sequence[Column] = COLUMNS) -> list[list[str]]:
    """The table's cells, a heading row first."""
    cells = [["variant", "seeds", *(heading for heading, *_ in columns)]]
    for name, members in group_runs(runs).items():
        row = [name, str(len(members))]
        for _, metric, form, spread in columns:
            values = [m.metrics[metric] * SCALE.get(metric, 1) for m in members]
            cell = format(mean(values), form)
            if spread and len(values) > 1:
                cell += f" ± {format(stdev(values), form)}"
            row.append(cell)
        cells.append(row)
    return cells


def terminal_table(runs: Sequence[Run], title: str, width: int) -> Table:
    """All columns where `width` characters hold them, else those that matter most."""
    few = [column for column in COLUMNS if column[1] not in WIDE_ONLY]
    heading, *body = rows(runs, COLUMNS if width >= WIDE else few)
    table = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
        caption="mean over seeds; val loss ± standard deviation",
        caption_justify="left",
    )
    for i, name in enumerate(heading):
        table.add_column(name, justify="right" if i else "left", no_wrap=True)
    for row in body:
        table.add_row(*row)
    return table


def markdown_table(runs: Sequence[Run]) -> str:
    heading, *body = rows(runs)
    rule = ["---", *["---:"] * (len(heading) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in [heading, rule, *body])
