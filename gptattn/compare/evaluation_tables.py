"""Makes the report's tables of loss by position and of loss by cache."""

from collections.abc import Callable
from dataclasses import dataclass

from gptattn.compare.evaluations import CacheCost, PositionLoss, cache_costs, position_losses
from gptattn.compare.results import Estimate, Section
from gptattn.compare.table import MISSING, half_interval


@dataclass(frozen=True)
class Table:
    """A table of the page: cells, under a heading, with a title and a caption."""

    title: str
    heading: list[str]
    body: list[list[str]]
    caption: str


def evaluation_tables(section: Section) -> list[Table]:
    """Return a table of what the section's runs were evaluated for: up to two."""
    positions, caches = position_losses(section), cache_costs(section)
    return [
        *([_positions(positions)] if positions else []),
        *([_caches(caches)] if caches else []),
    ]


def _positions(losses: list[PositionLoss]) -> Table:
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
                cells.append(MISSING if one is None else f"{_beyond(one):.4f}")
        body.append(cells)
    caption = (
        "Mean loss in nats over all positions of whole windows of so many tokens, ± half of its "
        "95% confidence interval over seeds, and the mean of those with more context than in "
        "training. Windows of different lengths are cut from the same text at different places."
    )
    return Table("Loss by length of context", heading, body, caption)


def _beyond(one: PositionLoss) -> float:
    """Return the mean loss beyond the trained length, which is an edge of the bins."""
    beyond = [(last - first + 1, e.mean) for first, last, e in one.bins if first > one.trained]
    return sum(n * mean for n, mean in beyond) / sum(n for n, _ in beyond)


def _caches(costs: list[CacheCost]) -> Table:
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
    return Table("Loss by cache", heading, body, caption)


def _shown(estimate: Estimate | None, words: Callable[[float], str] = "{:.4f}".format) -> str:
    if estimate is None:
        return MISSING
    return words(estimate.mean) + half_interval(estimate.interval, ".4f")


def change_words(change: float) -> str:
    """Format a change of the loss with four decimals and its sign, `+0.0000` for none."""
    return f"{round(change, 4) + 0.0:+.4f}"
