"""Says in words what the runs show, and no more.

Each sentence gives the answer first, then the numbers, then what would settle an open question.
"""

from gptattn.compare.comparison import Comparison, Row, Section
from gptattn.compare.differences import listed
from gptattn.compare.statistics import ALPHA, Difference, stein_seeds
from gptattn.runs.metrics import CACHE, FLOPS, PARAMS, SLICE, SPEED_RATIO

EXACT_COSTS = {CACHE: "cache", PARAMS: "parameters", FLOPS: "FLOPs per token"}
MIN_FOR_BEST = 3  # seeds per row needed to name a best row


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


def headline(comparison: Comparison) -> str:
    """Return `15 runs, 3 variants, 3 to 5 seeds each`, and the number of sections if several."""
    rows = [row for section in comparison.sections for row in section.rows]
    runs, variants = len({run.folder for run in comparison.runs}), len({row.name for row in rows})
    text = f"{runs} run{'s' * (runs > 1)}, {variants} variant{'s' * (variants > 1)}, "
    counts = {row.n for row in rows}
    least, most = min(counts), max(counts)
    text += f"{least}{f' to {most}' * (most > least)} seed{'s' * (most > 1)} each"
    sections = len(comparison.sections)
    return text + f", in {sections} sections" * (sections > 1)


def section_words(section: Section) -> list[str]:
    """Return the verdict on each row against the baseline, then the one on the best row."""
    baseline, *others = section.rows
    if not others:
        return [f"Nothing to compare: {section.baseline} is the only variant here."]
    sentences = []
    for row in others:
        parts = [difference_words(row, baseline)]
        if costs := cost_words(row, baseline):
            parts.append(f"{row.name} has {listed(costs)}.")
        if (ratio := row.metrics.get(SPEED_RATIO)) is not None and ratio.interval is not None:
            parts.append(speed_words(ratio.mean, *ratio.interval))
        sentences.append(" ".join(parts))
    max_seeds = baseline.runs[-1].max_seeds
    sentences += [interaction_words(d, max_seeds) for d in section.interactions]
    return [*sentences, best_words(section)]


def interaction_words(d: Difference, max_seeds: int) -> str:
    """Return the verdict on two parts: whether together they gain more than apart."""
    if not d.is_significant or d.interval is None or d.p is None:
        return unclear_words(d, max_seeds)
    low, high = d.interval
    less, least, most = ("less", low, high) if d.mean > 0 else ("more", -high, -low)
    test = f"95% interval {nats(least)} to {nats(most)}; n = {d.n}, {p_value(d.p)}"
    return f"{d.variant} gains {nats(abs(d.mean))} nats {less} than {d.baseline} ({test})."


def difference_words(row: Row, baseline: Row) -> str:
    """Return the verdict on a row: better, worse, or why that is unclear."""
    d = row.difference
    if d is None:
        pair = f"{row.name} vs {baseline.name}"
        return f"{pair} cannot be compared: they share no seed. Run both with the same seeds."
    if not d.is_significant or d.interval is None or d.p is None:
        return unclear_words(d, row.runs[-1].max_seeds)
    low, high = d.interval
    worse, least, most = ("worse", low, high) if d.mean > 0 else ("better", -high, -low)
    test = f"95% interval {nats(least)} to {nats(most)}; n = {d.n}, {p_value(d.p)}"
    return f"{d.variant} is {worse} than {d.baseline} by {nats(abs(d.mean))} nats ({test})."


def unclear_words(d: Difference, max_seeds: int) -> str:
    """Return the verdict on a non-significant difference, and what would settle it."""
    pair, gap = f"{d.variant} vs {d.baseline}", f"the gap is {d.mean:+.4f} nats at"
    if d.n == 1:
        only = f"{gap} the only seed in common (n = 1)"
        return f"{pair} has too few seeds: {only}. Run the same {MIN_FOR_BEST} seeds of each."
    if d.interval is None or d.p is None:
        same = f"{gap} every seed (n = {d.n}), so it has no spread"
        return f"{pair} cannot be tested: {same}. Check that the seed changes the runs."
    low, high = d.interval
    gap = f"the gap is between {signed(low)} and {signed(high)} nats"
    gap += f" (95% interval; n = {d.n}, {p_value(d.p)})."
    unclear = f"{pair} is too close to tell: {gap}"
    if d.target_half_width is None:
        how = f"even {max_seeds} seeds at this budget would be too few to show it."
        if (needed := d.seeds_needed) is not None and needed <= max_seeds:
            how = f"about {needed} seeds would show it (80% power): 'seed=range(1,{needed + 1})'."
        return f"{unclear} If the true gap is {nats(abs(d.mean))} nats, as observed, {how}"
    # `sweep.until` asks for an interval of this half-width.
    if high - low <= 2 * d.target_half_width:
        most = nats(max(-low, high))
        return f"{d.variant} and {d.baseline} differ by at most {most} nats, if at all: {gap}"
    seeds = stein_seeds(d.deviation, d.target_half_width, d.first or d.n, d.comparisons)
    return (
        f"{unclear} Narrowing it to ±{d.target_half_width:g} nats would take about {seeds:,} seeds."
    )


def cost_words(row: Row, baseline: Row) -> list[str]:
    """Return the costs that differ from the baseline's, such as `0.5 times the cache`.

    They are the same at every seed.
    """
    words = []
    is_foreign = any(run.uncached for run in row.runs)  # someone else's module
    for metric, cost in EXACT_COSTS.items():
        value, of = row.mean(metric), baseline.mean(metric)
        if value and of and abs(value / of - 1) >= 0.0005:
            count = " (as torch counts them)" * (is_foreign and metric == FLOPS)
            words.append(f"{value / of:.3g} times the {cost}{count}")
    return words


def speed_words(ratio: float, low: float, high: float) -> str:
    """Return the verdict on training speed: faster or slower than the baseline, or unclear."""
    if low <= 1 <= high:
        times = f"between {low:.3f} and {high:.3f} times the tokens/s"
        return f"Training speed is too close to tell: {times} (95% interval)."
    interval = f"95% interval {low:.3f} to {high:.3f}"
    way = "faster" if ratio > 1 else "slower"
    return f"Training is {way}: {ratio:.3f} times the tokens/s ({interval})."


def best_words(section: Section) -> str:
    """Return the verdict on the best row, or why none is named.

    A best row needs MIN_FOR_BEST seeds in every row and an empty `section.ties`.
    """
    leader = next(row for row in section.rows if row.name == section.leader)
    few = [f"{row.name}: {row.n}" for row in section.rows if row.n < MIN_FOR_BEST]
    pairs = [d for d in section.rivals if d.n < MIN_FOR_BEST]
    few = few or [f"{d.variant} shares {d.n} with {d.baseline}" for d in pairs]
    unnamed = "The best variant cannot be named:"
    if few:
        how = f"Run every variant with the same {MIN_FOR_BEST} seeds or more"
        return f"{unnamed} too few seeds ({listed(few)}). {how}."
    lowest = f"{leader.name} has the lowest mean loss, but"
    better = [d.variant for d in section.rivals if d.mean < 0 and d.variant not in section.ties]
    if better:
        others = f"{listed(better)} {'is' if len(better) == 1 else 'are'} better"
        how = "Run every variant with the same seeds"
        return f"{unnamed} {lowest} {others} over the seeds in common. {how}."
    if section.ties:
        lead = f"its lead over {listed(section.ties)} is not significant"
        return f"The best variant is too close to tell: {lowest} {lead}."
    highest = max(d.p for d in section.rivals if d.p is not None)
    n = min(row.n for row in section.rows)
    test = f"n = {n}{' or more' * (n != leader.n)}, largest {p_value(highest)}"
    best = f"{leader.name} is the best of {len(section.rows)} variants"
    return f"{best}: its validation loss is lower than any other's ({test})."


def match_words(section: Section) -> list[str]:
    """Say what `match` changed: `match=params: gqa has model.d_mlp=545, not 512`."""
    matched = [(row.name, row.runs[-1].match) for row in section.rows]
    return [
        f"match={m.cost}: {name} has {m.field}={m.after:g}, not {m.before:g}"
        for name, m in matched
        if m is not None and m.before is not None and m.after not in (None, m.before)
    ]


def length_notes(section: Section) -> list[str]:
    """Return a line on the rows that could not be tested at some lengths in their settings."""
    lacking = dict.fromkeys(
        row.name
        for row in section.rows
        for key, length in row.runs[0].settings.items()
        if key.startswith("validation.lengths[") and f"{SLICE}{length}" not in row.metrics
    )
    why = "which their weights or settings cannot exceed"
    return [f"not tested beyond the trained length, {why}: {listed([*lacking])}"] if lacking else []


def seed_notes(section: Section) -> list[str]:
    """Say how the number of seeds was decided, where `sweep.until` did."""
    stages = {row.difference.first for row in section.rows if row.difference} - {None}
    return [
        f"The spread over the first {first} seeds decided how many more to run, so intervals and p "
        f"of differences use the standard deviation of those {first} alone (Stein 1945)."
        for first in stages
    ]
