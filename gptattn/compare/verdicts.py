"""States in words what the runs support, and no more."""

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
    """Return a sentence per row against the baseline, and one on the best."""
    baseline, *others = section.rows
    if not others:
        return [f"{section.baseline} is alone here: there is nothing to compare it with."]
    sentences = []
    for row in others:
        parts = [difference_words(row, baseline)]
        if costs := cost_words(row, baseline):
            parts.append(f"{row.name} has {listed(costs)}")
        if (ratio := row.metrics.get(SPEED_RATIO)) is not None and ratio.interval is not None:
            parts.append(speed_words(ratio.mean, *ratio.interval))
        sentences.append(f"{'; '.join(parts)}.")
    sentences += [interaction_words(d) for d in section.interactions]
    return [*sentences, best_words(section)]


def interaction_words(d: Difference) -> str:
    """Say what two parts have together beyond the sum of what each has alone."""
    start = f"{d.variant}: {signed(d.mean)} nats beyond the sum of both"
    if d.interval is None or d.p is None:
        return f"{start}, without a spread over seeds (n = {d.n})."
    low, high = d.interval
    gain = f"together they gain {'less' if d.mean > 0 else 'more'} than the sum"
    what = gain if d.shown else "no interaction can be shown"
    interval = f"95% interval {signed(low)} to {signed(high)}; n = {d.n}, {p_value(d.p)}"
    return f"{start} ({interval}): {what}."


def difference_words(row: Row, baseline: Row) -> str:
    """Say whether a difference is shown; if not, why, and how many seeds would show it."""
    d = row.difference
    if d is None:
        return (
            f"{row.name} and {baseline.name} have no seed in common: their losses are not compared"
        )
    none = f"no difference between {d.variant} and {d.baseline} can be shown at n = {d.n}"
    if d.n == 1:
        return f"{none}: a single pair ({d.mean:+.4f} nats) has no spread over seeds"
    if d.interval is None or d.p is None:
        return f"{none}: their losses differ by the same amount at every seed, {d.mean:+.4f} nats"
    low, high = d.interval
    if d.shown:
        worse, least, most = ("worse", low, high) if d.mean > 0 else ("better", -high, -low)
        return (
            f"{d.variant} is {worse} than {d.baseline} by {nats(abs(d.mean))} nats (95% interval "
            f"{nats(least)} to {nats(most)}; n = {d.n}, {p_value(d.p)})"
        )
    none += f" (95% interval {signed(low)} to {signed(high)}, {p_value(d.p)})"
    if d.asked is None:
        most, needed = row.runs[-1].max_seeds, d.seeds_needed
        how = f"it is too small for {most} seeds of this budget"
        if needed is not None and needed <= most:
            how = f"about {needed} seeds would show it, as with 'seed=range(1,{needed + 1})'"
        true = "if the true difference is as large as the one observed"
        return f"{none}: {true}, {nats(abs(d.mean))} nats, {how}"
    # `sweep.until` asks for an interval of this half-width.
    if high - low <= 2 * d.asked:
        return f"{none}: if there is one, it is at most {nats(max(-low, high))} nats"
    seeds = stein_seeds(d.deviation, d.asked, d.first or d.n, d.comparisons)
    return f"{none}: ±{d.asked:g} nats would need about {seeds:,} seeds"


def cost_words(row: Row, baseline: Row) -> list[str]:
    """Return `0.5 times the cache` and the like: costs that differ, over the baseline's.

    No seed changes them.
    """
    words = []
    for metric, cost in EXACT_COSTS.items():
        value, of = row.mean(metric), baseline.mean(metric)
        if value and of and abs(value / of - 1) >= 0.0005:
            words.append(f"{value / of:.3g} times the {cost}")
    if words and any(run.uncached for run in row.runs):  # a module of others
        words.append("FLOPs as torch counts them")
    return words


def speed_words(ratio: float, low: float, high: float) -> str:
    """Say whether it is shown to train faster or slower than the baseline."""
    interval = f"95% interval {low:.3f} to {high:.3f}"
    if low <= 1 <= high:
        return f"no difference in training speed can be shown ({interval})"
    way = "faster" if ratio > 1 else "slower"
    return f"it trains {way}, at {ratio:.3f} times the tokens/s ({interval})"


def best_words(section: Section) -> str:
    """Return the sentence on the best row, or why none is named.

    A best row needs MIN_FOR_BEST seeds in every row and an empty `section.alike`.
    """
    leader = next(row for row in section.rows if row.name == section.leader)
    few = [f"{row.name}: {row.n}" for row in section.rows if row.n < MIN_FOR_BEST]
    if not few:
        few = [
            f"{d.variant} and {d.baseline} in common: {d.n}"
            for d in section.rivals
            if d.n < MIN_FOR_BEST
        ]
    if few:
        return f"Fewer than {MIN_FOR_BEST} seeds ({listed(few)}): no variant is named best."
    lowest = f"{leader.name} has the lowest mean loss, but"
    better = [d.variant for d in section.rivals if d.mean < 0 and d.variant not in section.alike]
    if better:
        return (
            f"{lowest} over the seeds in common {listed(better)} "
            f"{'is' if len(better) == 1 else 'are'} better: no variant is named best."
        )
    if section.alike:
        return f"{lowest} cannot be told apart from {listed(section.alike)}."
    highest = max(d.p for d in section.rivals if d.p is not None)
    n = min(row.n for row in section.rows)
    return (
        f"{leader.name} is the best of the {len(section.rows)} by validation loss: lower than "
        f"every other ({'at least ' * (n != leader.n)}n = {n}, {p_value(highest)} or less)."
    )


def match_words(section: Section) -> list[str]:
    """Say what `match` changed: `match=params: gqa has model.d_mlp=545, not 512`."""
    matched = [(row.name, row.runs[-1].match) for row in section.rows]
    return [
        f"match={m.what}: {name} has {m.field}={m.after:g}, not {m.before:g}"
        for name, m in matched
        if m is not None and m.before is not None and m.after not in (None, m.before)
    ]


def length_notes(section: Section) -> list[str]:
    """Return a line on the rows that were not asked at some of the lengths in their settings."""
    lacking = dict.fromkeys(
        row.name
        for row in section.rows
        for key, length in row.runs[0].settings.items()
        if key.startswith("validation.lengths[") and f"{SLICE}{length}" not in row.metrics
    )
    why = "to which weights or settings are bound"
    return [f"not asked beyond the trained length, {why}: {listed([*lacking])}"] if lacking else []


def seed_notes(section: Section) -> list[str]:
    """Say why there are so many seeds, where the first of them decided it."""
    stages = {row.difference.first for row in section.rows if row.difference} - {None}
    return [
        f"The spread over the first {first} seeds set how many more were run; intervals and p of "
        "differences use the standard deviation of those alone (Stein 1945)."
        for first in stages
    ]
