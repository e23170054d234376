"""States in words, and in a table, what changes between two sections."""

from collections.abc import Iterable

from gptattn.compare.across import BITS
from gptattn.compare.results import Across, Change
from gptattn.compare.table import HEADING_WIDTH, MISSING, difference_cells
from gptattn.compare.verdicts import listed, signed, size_words

# Metric -> what it is called, and its unit.
NAMES = {"val/loss": ("loss", "nats"), BITS: ("loss in bits per byte", "bits per byte")}


def title(across: Across) -> str:
    """Return `block=llama: how it changes from optim=adamw to optim=muon`."""
    words = f"how it changes from {across.first} to {across.second}"
    return f"{across.where}: {words}" if across.where else f"{words[0].upper()}{words[1:]}"


def sentences(across: Across) -> list[str]:
    """Return a sentence per change of a difference to the baseline, and one on the losses."""
    shown = [name for name, gap in across.gaps.items() if gap.difference.shown]
    lines = [_gap_words(across, name) for name in shown]
    rest = [name for name in across.gaps if name not in shown]
    if rest:
        lines.append(
            f"no change of the difference to {across.baseline} from {across.first} to "
            f"{across.second} can be shown for {listed(rest)}, "
            f"{_seeds(across.gaps[name] for name in rest)}."
        )
    return [*lines, _loss_words(across)]


def _gap_words(across: Across, name: str) -> str:
    gap, (first, second) = across.gaps[name], (across.first, across.second)
    better = "better" if gap.difference.mean < 0 else "worse"
    size = size_words(gap.difference, NAMES[across.metric][1])
    return (
        f"against {across.baseline}, {name} does {better} with {second} than with {first}, "
        f"{size}: its difference to {across.baseline} is "
        f"{signed(gap.first)} with {first}, {signed(gap.second)} with {second}."
    )


def _loss_words(across: Across) -> str:
    """Return which losses fall, rise, and cannot be shown to do either."""
    shown = {name: d for name, c in across.losses.items() if (d := c.difference).shown}
    lower = [name for name, d in shown.items() if d.mean < 0]
    higher = [name for name, d in shown.items() if d.mean > 0]
    rest = [name for name in across.losses if name not in shown]
    clauses = [
        *([f"is lower for {listed(lower)}"] if lower else []),
        *([f"is higher for {listed(higher)}"] if higher else []),
        *([f"cannot be shown to differ for {listed(rest)}"] if rest else []),
    ]
    loss = f"the {NAMES[across.metric][0]} {'; it '.join(clauses)}"
    return f"with {across.second} instead of {across.first}, {loss}."


def _seeds(changes: Iterable[Change]) -> str:
    """Return `with 5 seeds`, or `with 3 to 5 seeds`."""
    found = sorted({change.difference.n for change in changes})
    span = f"{found[0]}" if len(found) == 1 else f"{found[0]} to {found[-1]}"
    return f"with {span} seed{'s' * (found[-1] > 1)}"


def notes(across: Across) -> list[str]:
    """Return a line on further settings that differ, and one on how much text a token is."""
    lines = []
    if across.others:
        lines += [f"the two differ in more than {across.setting}: {', '.join(across.others)}"]
    if across.token_bytes is not None:
        first, second = across.token_bytes
        lines += [
            f"a token is {first:.2f} bytes of the held-out text with {across.first} and "
            f"{second:.2f} with {across.second}: equal steps are not equal text, nor equal time"
        ]
    return lines


def cells(across: Across) -> list[list[str]]:
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


def caption(across: Across) -> str:
    """Return what stands below the table."""
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
