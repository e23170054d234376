"""The part of docs/arena.md that holds our differences against those that papers report."""

from collections.abc import Iterator
from itertools import product

from arena_claims import BETTER, CLAIMS, EQUAL, WORSE, Claim, Model

from gptattn.compare.comparison import Comparison, Row, Section
from gptattn.compare.statistics import Difference, compare_pairs
from gptattn.compare.table import markdown_table
from gptattn.compare.verdicts import signed

WORDS = {BETTER: "better", EQUAL: "as good", WORSE: "worse"}
Pair = tuple[str, str]  # names of rows: what a claim is against, then the claim's variant


def published(comparison: Comparison) -> Iterator[str]:
    """Yield a table with a line for each claim and block, and a sentence on those left out."""
    cells = [["variant", "against", "published", "source", "block", "here", "95% interval", "sign"]]
    left_out = []
    known = [(section, _differences(section)) for section in comparison.sections]
    for claim in CLAIMS:
        for section, differences in known:
            found = [differences[p] for p in _pairs(claim, section) if p in differences]
            cells += [_line(claim, section, difference) for difference in found]
            if not found and _rows(claim.model, section):
                left_out.append(_left_out(claim, section))
    if len(cells) == 1:
        yield "No variant here has a published result to hold it against."
    else:
        yield markdown_table(cells).replace("---:", "---")
    if left_out:
        listed = ", ".join(dict.fromkeys(left_out))
        yield f"Left out, since what the paper compared with is not among the runs: {listed}."


def _differences(section: Section) -> dict[Pair, Difference]:
    """Return the difference of each pair that a claim is on.

    Those to the block's baseline are the report's. The others are corrected for all of these
    pairs as well as for the report's comparisons.
    """
    known = {(section.baseline, row.name): row.difference for row in section.rows if row.difference}
    asked = dict.fromkeys(pair for claim in CLAIMS for pair in _pairs(claim, section))
    others = [pair for pair in asked if pair not in known]
    groups = {row.name: row.runs for row in section.rows}
    found = compare_pairs(groups, others, len(known) + len(others))
    return known | {(d.baseline, d.variant): d for d in found}


def _pairs(claim: Claim, section: Section) -> list[Pair]:
    both = product(_rows(claim.against, section), _rows(claim.model, section))
    return [(against.name, row.name) for against, row in both]


def _rows(model: Model, section: Section) -> list[Row]:
    """Return the section's rows of the model."""
    position = model.position or _base(section).runs[0].choices.get("position")
    return [
        row
        for row in section.rows
        if row.runs[0].variant == model.variant
        and row.runs[0].choices.get("position") == position
        and model.settings.items() <= row.runs[0].settings.items()
    ]


def _base(section: Section) -> Row:
    return next(row for row in section.rows if row.name == section.baseline)


def _line(claim: Claim, section: Section, d: Difference) -> list[str]:
    interval, sign = "–", "not shown"  # noqa: RUF001
    if d.interval is not None:
        interval = f"{signed(d.interval[0])} to {signed(d.interval[1])}"
    if d.shown:
        sign = "agrees" if d.mean * claim.sign > 0 else "**differs**"
    words = f"{WORDS[claim.sign]}: {claim.words}"
    block = _base(section).runs[0].choices.get("block", "")
    return [d.variant, d.baseline, words, claim.source, block, signed(d.mean), interval, sign]


def _left_out(claim: Claim, section: Section) -> str:
    title = f" ({section.title})" if section.title else ""
    model, against = (
        " ".join(filter(None, [one.variant, one.position])) for one in (claim.model, claim.against)
    )
    return f"{model} against {against}{title}"
