"""States in words what the runs support, and no more."""

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction

from gptattn.compare.comparison import BITS, Across, Comparison, Row, Section
from gptattn.compare.ladder import BEYOND, LadderReport, Multiplier, Scaled
from gptattn.compare.statistics import (
    ALPHA,
    RESOLUTION,
    SEEDS_CAP,
    Difference,
    Interval,
    correlation_interval,
    stein_seeds,
)

LARGEST_DENOMINATOR = 16  # "1/3 of the cache" helps readers, "37/64" does not
LISTED = 6  # names in one sentence
FEWEST_FOR_PAIRING = 5  # seeds; fewer say nothing about a correlation over seeds
# What a ladder's multiplier multiplies.
NEEDS = {
    "compute": "compute",
    "cache": "cache per token",
    "seconds": "seconds of training",
}
# Metric -> its name and unit.
NAMES = {"val/loss": ("loss", "nats"), BITS: ("loss in bits per byte", "bits per byte")}
FEWEST_FOR_FIRST = 3  # seeds per row needed to name a best row


def nats(value: float) -> str:
    """Format a loss with four decimals, or with two digits if it is below 0.0005."""
    return f"{value:.4f}" if abs(value) >= 0.0005 or value == 0 else f"{value:.1e}"


def signed(value: float) -> str:
    """Format a loss difference as `nats` does, with a + if positive."""
    return f"+{nats(value)}" if value > 0 else nats(value)


def p_value(p: float) -> str:
    """Format p: `p < 0.001`, `p = 0.012` or `p = 0.34`."""
    if p < 0.001:
        return "p < 0.001"
    if 0.0495 <= p < ALPHA:
        return f"p < {ALPHA}"  # rounded, 0.0496 would read 0.050, not significant
    return f"p = {p:.3f}" if p < 0.0995 else f"p = {p:.2f}"


def share(value: float, of: float) -> str:
    """Format value / of: as `1/3` or `2 times` if that is exact and simple, otherwise `37.0%`."""
    ratio = value / of
    simple = Fraction(ratio).limit_denominator(LARGEST_DENOMINATOR)
    if math.isclose(float(simple), ratio, rel_tol=1e-9):
        return f"{simple}" if ratio < 1 else f"{float(simple):.4g} times"
    return f"{ratio:.1%}" if ratio < 1 else f"{ratio:.2f} times"


def more_or_less(value: float, of: float, more: str, less: str) -> str:
    """Format a relative change as `10% fewer`.

    Whole percent from 10%, then one decimal, two below 0.1%; "" if two decimals show nothing.
    """
    change = abs(value / of - 1)
    if change < 0.00005:
        return ""
    digits = 0 if change >= 0.0995 else 1 if change >= 0.00095 else 2
    return f"{change:.{digits}%} {more if value > of else less}"


def section_words(section: Section) -> list[str]:
    """Return a sentence per row against the baseline, and one on the best."""
    if len(section.rows) < 2:
        return [f"{section.baseline} is alone here: there is nothing to compare it with."]
    baseline = next(row for row in section.rows if row.name == section.baseline)
    sentences = [row_words(row, baseline) for row in section.rows if row is not baseline]
    return [*sentences, first_words(section)]


def sure_words(section: Section) -> list[str]:
    """Say why there are so many seeds, and what sharing them among variants was worth."""
    return [*_stage_words(section), *_pairing_words(section)]


def _stage_words(section: Section) -> list[str]:
    stages = {d.first for d in _differences(section) if d.first}
    if not stages:
        return []
    first = min(stages)
    return [
        f"More seeds followed on the first {first}, as many as the spread over those asks for; "
        "the intervals and p of differences have the deviation of the first alone (Stein 1945)."
    ]


def _pairing_words(section: Section) -> list[str]:
    found = [d for d in _differences(section) if d.n >= FEWEST_FOR_PAIRING and d.unpaired]
    if not found:
        return []
    free = sum(d.unpaired**2 for d in found)
    correlation = sum(d.unpaired**2 - d.paired**2 for d in found) / free
    n = min(d.n for d in found)
    low, high = correlation_interval(correlation, n)
    return [
        f"Sharing seeds made the variance of the differences {1 - correlation:.2f} of what runs at "
        f"other seeds would have (95% interval {1 - high:.2f} to {1 - low:.2f}; n = {n})."
    ]


def _differences(section: Section) -> list[Difference]:
    return [row.difference for row in section.rows if row.difference]


def row_words(row: Row, baseline: Row) -> str:
    """Return the sentence on one row: loss, costs and speed against the baseline."""
    loss = difference_words(row.difference, row.name, baseline.name)
    costs = [*cost_words(row, baseline), *speed_words(row, baseline)]
    if not costs:
        return f"{loss}."
    return f"{loss}; {row.name} {listed(costs)}."


def difference_words(d: Difference | None, name: str, baseline: str) -> str:
    """Say whether a difference is shown; if not, why, and how many seeds would show it."""
    if d is None:
        return f"{name} and {baseline} have no seed in common: their losses are not compared"
    if d.shown:
        return shown_words(d)
    none = f"no difference between {name} and {baseline} can be shown at n = {d.n}"
    if d.n == 1:
        return f"{none}: a single pair ({d.mean:+.4f} nats) has no spread over seeds"
    if d.interval is None:
        return f"{none}: {_without_spread(d)}"
    return f"{none} ({_evidence(d, d.interval)}): {_bound(d, d.interval) or _needed(d)}"


def shown_words(d: Difference) -> str:
    """Return the clause on a shown difference.

    `gqa is worse than mha by 0.0120 nats (95% interval 0.0080 to 0.0160; n = 5, p = 0.010)`.
    """
    return f"{d.variant} is {'worse' if d.mean > 0 else 'better'} than {d.baseline} {size_words(d)}"


def size_words(d: Difference, unit: str = "nats") -> str:
    """Return the size of a shown difference: `by 0.0120 nats (95% interval ...; n = 5, ...)`."""
    assert d.interval is not None
    assert d.p is not None
    low, high = d.interval if d.mean > 0 else (-d.interval[1], -d.interval[0])
    return (
        f"by {nats(abs(d.mean))} {unit} (95% interval {nats(low)} to {nats(high)}; "
        f"n = {d.n}, {p_value(d.p)})"
    )


def _evidence(d: Difference, interval: Interval) -> str:
    assert d.p is not None
    low, high = interval
    return f"95% interval {signed(low)} to {signed(high)}, {p_value(d.p)}"


def _without_spread(d: Difference) -> str:
    if abs(d.mean) <= RESOLUTION:
        return "their losses are equal at every seed"
    return (
        f"they differ by the same amount at every seed, {signed(d.mean)} nats, as if the seed had "
        "no effect or losses were rounded, so there is no spread to test against"
    )


def _bound(d: Difference, interval: Interval) -> str:
    """Bound the difference, if `sweep.until` has the seeds that it asks for.

    Otherwise say how many it asks for; "" without.
    """
    low, high = interval
    if d.asked is None:
        return ""
    if high - low <= 2 * d.asked:
        return f"if there is one, it is at most {nats(max(-low, high))} nats"
    seeds = stein_seeds(d.deviation, d.asked, d.first or d.n, d.comparisons)
    return f"±{d.asked:g} nats would need about {seeds:,} seeds"


def _needed(d: Difference) -> str:
    number = f"more than {SEEDS_CAP:,}" if d.seeds_needed is None else f"about {d.seeds_needed}"
    return (
        f"if the true difference is as large as the one observed, {nats(abs(d.mean))} nats, "
        f"{number} seeds would show it"
    )


def cost_words(row: Row, baseline: Row) -> list[str]:
    """Return phrases on cache, parameters and FLOPs; these are exact, whatever the seed."""
    words = []
    pairs = {m: (row.mean(m), baseline.mean(m)) for m in row.metrics if m.startswith("cost/")}
    for metric, (value, of) in pairs.items():
        if not value or not of or value == of:
            continue
        change = more_or_less(value, of, "more", "fewer")
        if metric == "cost/kv_bytes_per_token":
            words.append(f"needs {share(value, of)} {'of ' * (value < of)}the cache")
        elif metric == "cost/params" and change:
            words.append(f"has {change} parameters")
        elif metric == "cost/flops_per_token" and change:
            words.append(f"takes {change} FLOPs per token")
    return sorted(words, key=lambda text: not text.startswith("needs"))


def speed_words(row: Row, baseline: Row) -> list[str]:
    """Return a phrase on the ratio of tokens/s if its interval over seeds excludes 1."""
    if row.speed is None:
        return []
    ratio, (low, high) = row.speed
    if low <= 1 <= high or f"{ratio:.2f}" == "1.00":
        return []
    return [f"trained at {ratio:.2f} times the tokens/s ({low:.2f} to {high:.2f})"]


def first_words(section: Section) -> str:
    """Return the sentence on the best row, or why none is named.

    A best row needs FEWEST_FOR_FIRST seeds in every row and an empty `section.alike`.
    """
    leader = next(row for row in section.rows if row.name == section.leader)
    few = [f"{row.name}: {row.n}" for row in section.rows if row.n < FEWEST_FOR_FIRST]
    few += [
        f"{d.variant} and {d.baseline} in common: {d.n}"
        for d in section.rivals
        if d.n < FEWEST_FOR_FIRST and not few
    ]
    if few:
        return f"Fewer than {FEWEST_FOR_FIRST} seeds ({listed(few)}): no variant is named best."
    better = [d.variant for d in section.rivals if d.mean < 0 and d.variant not in section.alike]
    if better:
        return (
            f"{leader.name} has the lowest mean loss, but over the seeds in common "
            f"{listed(better)} {'is' if len(better) == 1 else 'are'} better: "
            "no variant is named best."
        )
    if section.alike:
        return (
            f"{leader.name} has the lowest mean loss, but cannot be told apart from "
            f"{listed(section.alike)}."
        )
    highest = max(d.p for d in section.rivals if d.p is not None)
    n = min(row.n for row in section.rows)
    return (
        f"{leader.name} is the best of the {len(section.rows)} by validation loss: lower than "
        f"every other ({'at least ' * (n != leader.n)}n = {n}, {p_value(highest)} or less)."
    )


def match_words(section: Section) -> list[str]:
    """Say what `match` changed: `match=params: gqa's MLP widened from 512 to 545, ...`."""
    lines = []
    for row in section.rows:
        m = row.runs[-1].match
        if m is None:
            continue
        field = {"model.d_mlp": "MLP"}.get(m.field, m.field)
        what = {"params": "parameters", "flops": "FLOPs", "kv_cache": "cache"}.get(m.what, m.what)
        if m.before is None or m.after is None:
            change = f"{row.name} needed no change"
        elif m.after == m.before:
            change = f"{row.name}'s {field} stayed at {m.after:g}"
        else:
            verb = "widened" if m.after > m.before else "narrowed"
            change = f"{row.name}'s {field} {verb} from {m.before:g} to {m.after:g}"
        off = abs(m.reached / m.target - 1) if m.target else math.inf
        near = f"within {_up(off)} of {m.to}'s" if off else f"equal to {m.to}'s"
        lines.append(f"match={m.what}: {change}, {what} {near}.")
    return lines


def _up(share: float) -> str:
    """Format a percentage, rounded up so that "within" stays true."""
    return f"{math.ceil(share * 1e4 - 1e-9) / 1e2:g}%"


def listed(items: Sequence[str]) -> str:
    """Join names with commas and `and`; of more than seven, six and how many more."""
    if len(items) > LISTED + 1:
        items = [*items[:LISTED], f"{len(items) - LISTED} more"]
    *start, last = items
    return f"{', '.join(start)} and {last}" if start else last


def seed_words(counts: Iterable[int]) -> str:
    """Return `5 seeds`, or `3 to 5 seeds`."""
    ordered = sorted(counts)
    low, high = ordered[0], ordered[-1]
    return f"{low} seed{'s' * (low > 1)}" if low == high else f"{low} to {high} seeds"


def headline(comparison: Comparison) -> str:
    """Return `15 runs, 3 variants, 5 seeds each`, and the number of sections if several."""
    rows = [row for section in comparison.sections for row in section.rows]
    runs, variants = len({run.folder for run in comparison.runs}), len({row.name for row in rows})
    text = f"{runs} run{'s' * (runs > 1)}, {variants} variant{'s' * (variants > 1)}, "
    text += f"{seed_words(row.n for row in rows)} each"
    sections = len(comparison.sections)
    return text + f", in {sections} sections" * (sections > 1)


def across_title(across: Across) -> str:
    """Return `block=llama: how it changes from optim=adamw to optim=muon`."""
    words = f"how it changes from {across.first} to {across.second}"
    return f"{across.where}: {words}" if across.where else f"{words[0].upper()}{words[1:]}"


def across_words(across: Across) -> list[str]:
    """Return a sentence per change of a difference to the baseline, and one on the losses."""
    shown = [name for name, gap in across.gaps.items() if gap.difference.shown]
    lines = [_gap_words(across, name) for name in shown]
    rest = [name for name in across.gaps if name not in shown]
    if rest:
        lines.append(
            f"no change of the difference to {across.baseline} from {across.first} to "
            f"{across.second} can be shown for {listed(rest)}, "
            f"with {seed_words(across.gaps[name].difference.n for name in rest)}."
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


def across_notes(across: Across) -> list[str]:
    """Return a line on other settings that differ, and one on how much text a token is."""
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


def ladder_title(report: LadderReport) -> str:
    """Return `Needed for the same loss: 5 sizes, 3 seeds`."""
    sizes, seeds = len(report.sizes), seed_words([report.seeds])
    words = f"needed for the same loss: {sizes} sizes, {seeds}"
    return f"{report.where}: {words}" if report.where else f"{words[0].upper()}{words[1:]}"


def ladder_words(report: LadderReport) -> list[str]:
    """Return a sentence per variant and cost, and some on how good the law of compute is."""
    lines = []
    for scaled in report.costs:
        loss = "the same loss" if scaled.shared else f"a loss of {scaled.loss:.4f}"
        lines += [
            f"{name} needs {multiplier_words(found)} times the {NEEDS[scaled.cost]} of "
            f"{report.baseline} for {loss}."
            for name, found in scaled.multipliers.items()
        ]
    compute = report.costs[0]
    return [*lines, _prediction(report, compute), *_holds(report)]


def multiplier_words(found: Multiplier) -> str:
    """Return `0.92 (0.63 to 1.35)`."""
    if found.interval is None:
        return f"{found.value:.2f}"
    low, high = found.interval
    return f"{found.value:.2f} ({low:.2f} to {high:.2f})"


def _prediction(report: LadderReport, scaled: Scaled) -> str:
    """Say how well the smaller sizes predicted the largest."""
    errors = {name: scaled.predicted[name] - loss for name, loss in scaled.measured.items()}
    each = [f"{name} by {error:+.4f}" for name, error in errors.items()]
    return (
        f"The law through the {len(report.sizes) - 1} smaller sizes misses the losses of the "
        f"largest: {listed(each)} nats."
    )


def _holds(report: LadderReport) -> list[str]:
    """Say for each cost whether the law holds, and extrapolate compute where it does."""
    lines = []
    for scaled in report.costs:
        if scaled.misfit is not None and scaled.misfit < ALPHA:
            lines.append(
                f"The law of {NEEDS[scaled.cost].removeprefix('the ')} misses the means by more "
                f"than seeds do ({p_value(scaled.misfit)}): its intervals are widened by "
                f"{scaled.widened:.1f}, and nothing is extrapolated."
            )
    beyond = report.costs[0].beyond
    if beyond is not None:
        each = [f"{loss:.4f} for {name}" for name, loss in beyond.items()]
        lines.append(
            f"The law holds at every size ({p_value(report.costs[0].misfit or 0)}). With "
            f"{BEYOND:g} times the compute of the largest it gives {listed(each)}: an "
            "extrapolation."
        )
    return lines


def ladder_notes(report: LadderReport) -> list[str]:
    """Return the law of compute in symbols, and where its exponents differ."""
    law = report.costs[0].law
    exponent = law.exponents[report.baseline]
    factor = law.factors[report.baseline]
    shown = (
        f"{report.baseline}: loss = {law.floor:.3f} + {factor:.3f} * "
        f"(FLOPs / {law.unit:.3g})^-{exponent:.3f}"
    )
    apart = [scaled for scaled in report.costs if not scaled.shared]
    differ = [
        f"exponents of {NEEDS[scaled.cost].removeprefix('the ')} differ between variants, so the "
        f"multipliers hold at {scaled.loss:.4f} nats, which all of the largest size have reached"
        for scaled in apart
    ]
    return [shown, *differ]
