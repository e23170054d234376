"""Loss against the share of steps that was uptrained: a panel for each target."""

from collections.abc import Sequence
from statistics import mean
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from gptattn.compare.finished_runs import Run
from gptattn.compare.plot_style import INK, SIZE, STYLE, Plot, drawn, look
from gptattn.compare.statistics import t_interval
from gptattn.compare.uptrain.experiment import Experiment

NAME = "uptrain"
LINES = {"source": (0, (4, 2)), "scratch": (0, (1, 1.5))}


def uptrain_plot(experiment: Experiment) -> Plot:
    """A line with error bars for each method; the source and the target from scratch lie level."""
    targets = experiment.targets
    zoomed = _zoom(experiment)
    with rc_context(STYLE):
        rows = 1 if zoomed is None else 2
        size = (SIZE[0] * max(1.4, 0.8 * len(targets)), SIZE[1] * (0.7 * rows + 0.2))
        figure = Figure(figsize=size, layout="constrained")
        panels = figure.subplots(rows, len(targets), sharey="row", squeeze=False)
        for row in panels:
            row[0].set_ylabel("validation loss (nats)")
            for axes, target in zip(row, targets, strict=True):
                _draw(axes, experiment, target)
        if zoomed is not None:
            panels[1][0].set_ylim(*zoomed)
        handles, names = panels[0][0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=3)
        return drawn(figure, NAME, "Loss against uptraining", _caption(experiment, rows > 1))


def _caption(experiment: Experiment, zoomed: bool) -> str:
    n = sorted({len(members) for members in experiment.cells.values()})
    over = f"{n[0]}" if len(n) == 1 else f"{n[0]} to {n[-1]}"
    caption = (
        f"Mean over {over} seed{'s' * (n[-1] > 1)} and its 95% interval, against the share α "
        f"of the original {experiment.original_steps:,} steps. Level lines: from scratch."
    )
    return caption + " Below, the same without the top." * zoomed


def _zoom(experiment: Experiment) -> tuple[float, float] | None:
    """Limits of the loss for all that was trained; None where nothing lies far above it."""
    trained = [_loss(m) for (_, _, steps), m in experiment.cells.items() if steps]
    trained += [_loss(m) for m in (experiment.originals, *experiment.scratch.values()) if m]
    low, high = min(trained), max(trained)
    room = 0.1 * (high - low)
    highest = max(_loss(members) for members in experiment.cells.values())
    return (low - room, high + room) if highest > high + (high - low) / 2 else None


def _draw(axes: Any, experiment: Experiment, target: str) -> None:
    axes.grid(color=INK, alpha=0.15, linewidth=0.6)
    axes.set_axisbelow(True)
    _level(axes, experiment.originals, f"{experiment.source}, the original", "source")
    if experiment.scratch[target]:
        _level(axes, experiment.scratch[target], "the target from scratch", "scratch")
    spread = max(1e-9, *(experiment.share(steps) for steps in experiment.steps))
    for i, method in enumerate(experiment.methods):
        cells = [
            (experiment.share(steps), experiment.cells[target, method, steps])
            for steps in experiment.steps
            if (target, method, steps) in experiment.cells
        ]
        # Beside each other, so that no bar hides another.
        x = [share + (i - (len(experiment.methods) - 1) / 2) * spread / 80 for share, _ in cells]
        y = [_loss(members) for _, members in cells]
        axes.errorbar(
            x,
            y,
            yerr=[_half(members) for _, members in cells],
            label=method,
            linewidth=1.4,
            markersize=5,
            capsize=2,
            **look(i),
        )
    axes.set_xticks([experiment.share(steps) for steps in experiment.steps])
    axes.set(title=target, xlabel="α, share of the original steps")


def _level(axes: Any, runs: Sequence[Run], name: str, kind: str) -> None:
    axes.axhline(_loss(runs), color=INK, linewidth=1, linestyle=LINES[kind], label=name, zorder=1)


def _loss(runs: Sequence[Run]) -> float:
    return mean(run.metrics["val/loss"] for run in runs)


def _half(runs: Sequence[Run]) -> float:
    interval = t_interval([run.metrics["val/loss"] for run in runs])
    return 0.0 if interval is None else (interval[1] - interval[0]) / 2
