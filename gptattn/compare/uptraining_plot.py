"""Plots loss against the share of uptraining steps: a panel for each target variant."""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from gptattn.compare.chart import Chart, Series
from gptattn.compare.plot_style import INK, SIZE, Plot, drawn, line_look, look
from gptattn.compare.results import Row, Section
from gptattn.compare.size_plot import row_series
from gptattn.compare.uptraining import method_of, rank_of

SHARE = "α, share of the original steps"


def uptraining_plot(sections: Sequence[Section], prefix: str) -> Plot:
    """Plot the sections of one family, sorted by share; references are horizontal lines.

    The references are the original and the target from scratch. The file name begins with `prefix`.
    """
    made = [row for section in sections for row in section.rows if row.runs[0].origin]
    targets = sorted({row.runs[0].variant for row in made})
    order = {_label(row): rank_of(method_of(row.runs[0])) for row in made}
    labels = sorted(order, key=lambda label: (order[label], label))
    limits = _zoomed(sections)
    rows = 1 if limits is None else 2
    size = (SIZE[0] * max(1.4, 0.8 * len(targets)), SIZE[1] * (0.7 * rows + 0.2))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(rows, len(targets), sharey="row", squeeze=False)
    for row in panels:
        row[0].set_ylabel("validation loss (nats)")
        for axes, target in zip(row, targets, strict=True):
            _draw(axes, sections, target, labels)
    if limits is not None:
        panels[1][0].set_ylim(*limits)
    handles, names = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3)
    title, caption = "Loss against uptraining", _caption(sections)
    return drawn(figure, f"{prefix}loss_uptraining", title, caption, _chart(sections, title))


def _chart(sections: Sequence[Section], title: str) -> Chart:
    """Return the same for the page: all targets in one chart."""
    shares = [section.share or 0.0 for section in sections]
    rows: dict[str, list[tuple[float, Row]]] = {}
    for section, share in zip(sections, shares, strict=True):
        for row in section.rows:
            if row.runs[0].origin:
                rows.setdefault(row.name, []).append((share, row))
    levels = {f"{sections[0].rows[0].name}, the original": sections[0].rows[0]}
    levels |= {row.name: row for row in _from_scratch(sections)}
    series = [row_series(name, points, i) for i, (name, points) in enumerate(rows.items())]
    ends = [min(shares), max(shares)]
    series += [
        Series(name, x=ends, y=[row.loss] * 2, n=row.n, **line_look(look(i)))
        for i, (name, row) in enumerate(levels.items(), start=len(series))
    ]
    # At first without the conversions that were not trained, if those are far above the others.
    limits = _zoomed(sections)
    return Chart(title, "α", SHARE, "validation loss (nats)", series, y_range=limits)


def _caption(sections: Sequence[Section]) -> str:
    caption = (
        f"{sections[0].family[0].upper()}{sections[0].family[1:]}: mean over seeds with its 95% "
        "confidence interval, against the share α of the original steps. Horizontal lines: the "
        "original, and the target from scratch."
    )
    return caption + " Lower panels: the same, without the highest losses." * (
        _zoomed(sections) is not None
    )


def _zoomed(sections: Sequence[Section]) -> tuple[float, float] | None:
    """Return loss limits for a second row without conversions that were not trained (share 0).

    Return None if no loss is far above the trained ones.
    """
    highest = max(row.loss for section in sections for row in section.rows)
    trained = [row.loss for section in sections if section.share for row in section.rows]
    trained += [row.loss for row in (sections[0].rows[0], *_from_scratch(sections))]
    low, high = min(trained), max(trained)
    room = 0.1 * (high - low)
    return (low - room, high + room) if room and highest > high + 5 * room else None


def _draw(axes: Any, sections: Sequence[Section], target: str, labels: Sequence[str]) -> None:
    axes.grid(color=INK, alpha=0.15, linewidth=0.6)
    axes.set_axisbelow(True)
    original = sections[0].rows[0]
    _level(axes, original, f"{original.name}, the original", (0, (4, 2)))
    points = [
        (section.share or 0.0, row)
        for section in sections
        for row in section.rows
        if row.runs[0].variant == target
    ]
    for row in _from_scratch(sections):
        if row.runs[0].variant == target:
            _level(axes, row, "the target from scratch", (0, (1, 1.5)))
    shares = [section.share or 0.0 for section in sections]
    for i, label in enumerate(labels):
        own = [(share, row) for share, row in points if _label(row) == label]
        # Shift the methods sideways so that no error bar hides another.
        aside = (i - (len(labels) - 1) / 2) * max(shares) / 80
        axes.errorbar(
            [share + aside for share, _ in own],
            [row.loss for _, row in own],
            yerr=[_half(row) for _, row in own],
            label=label,
            linewidth=1.4,
            markersize=5,
            capsize=2,
            **look(i),
        )
    axes.set_xticks(shares)
    axes.set(title=target, xlabel=SHARE)


def _from_scratch(sections: Sequence[Section]) -> list[Row]:
    return list({row.name: row for section in sections for row in section.from_scratch}.values())


def _label(row: Row) -> str:
    """Return the row's name without its target: the method, and settings if needed."""
    return row.name.removeprefix(f"{row.runs[0].variant} by ")


def _half(row: Row) -> float:
    interval = row.metrics["val/loss"].interval
    return 0.0 if interval is None else (interval[1] - interval[0]) / 2


def _level(axes: Any, row: Row, name: str, line: Any) -> None:
    axes.axhline(row.loss, color=INK, linewidth=1, linestyle=line, label=name, zorder=1)
