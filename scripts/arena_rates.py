"""The part of docs/arena.md on learning rates: each variant's loss at each rate."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from gptattn.compare.comparison import Comparison
from gptattn.compare.finished_runs import read_runs, without_replaced
from gptattn.compare.table import markdown_table
from gptattn.runs.folder import RunFolder, begun_below, done_below
from gptattn.sweep.plan import DIVERGED
from gptattn.sweep.tuning import cell_and_rate

Losses = dict[str, dict[float, float]]  # by variant and settings, then by rate; infinite: diverged


def rates(comparison: Comparison, tuning: Path) -> Iterator[str]:
    """Yield a sentence, a table of the losses at each rate, and a line on rates at the edge."""
    seed, losses = tried(tuning)
    every = sorted({rate for own in losses.values() for rate in own})
    if not every:
        yield "No learning rate was searched."
        return
    yield (
        f"Losses with seed {seed}; the one at the rate that the variant runs at is bold, and a "
        "dash stands for a rate that it was not tried at."
    )
    cells, edges = [["variant", "block", "lr", *(f"{rate:g}" for rate in every)]], []
    for row in (row for section in comparison.sections for row in section.rows):
        found = cell_and_rate(RunFolder(row.runs[0].folder))
        assert found is not None  # the comparison has read the same file
        own, rate = losses.get(found[0], {}), found[1]
        block = row.runs[0].choices.get("block", "")
        words = [_words(own, one, rate) for one in every]
        cells.append([row.name, block, f"{rate:g}", *words])
        if len(own) > 1 and rate in (min(own), max(own)):
            side = "lowest" if rate == min(own) else "highest"
            edges.append(f"{row.name} ({', '.join(filter(None, [block, side]))})")
    yield markdown_table(cells).replace("---:", "---")
    if edges:
        yield (
            "At the lowest or the highest rate that was tried, so that a better one may lie "
            f"beyond: {', '.join(edges)}."
        )


def _words(own: Mapping[float, float], rate: float, chosen: float) -> str:
    if rate not in own:
        return "–"  # noqa: RUF001
    loss = f"{own[rate]:.4f}" if math.isfinite(own[rate]) else "diverged"
    return f"**{loss}**" if rate == chosen else loss


def tried(tuning: Path) -> tuple[int, Losses]:
    """Return the seed of the newest tuning run in the folder, and the losses with that seed."""
    if not done_below(tuning):
        return 0, {}
    runs = sorted(without_replaced(read_runs([tuning])[0])[0], key=lambda run: run.finished)
    seed = runs[-1].seed
    losses: Losses = {}
    for run in runs:
        found = cell_and_rate(RunFolder(run.folder))
        if found is not None and run.seed == seed:
            losses.setdefault(found[0], {})[found[1]] = run.metrics["val/loss"]
    for folder in begun_below(tuning):
        found = cell_and_rate(folder)
        if found is None or folder.done or (folder.read_failure() or {}).get("exit") != DIVERGED:
            continue
        if folder.read_settings()["seed"] == seed:
            losses.setdefault(found[0], {}).setdefault(found[1], math.inf)
    return seed, losses
