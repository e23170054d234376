"""What an uptraining experiment supports, in words, and no more."""

import math
from collections.abc import Sequence

from gptattn.compare.results import Difference
from gptattn.compare.uptrain.experiment import Experiment
from gptattn.compare.uptrain.findings import USABLE, Converted, Findings, Order
from gptattn.compare.verdicts import nats, p_value


def sentences(experiment: Experiment, findings: Findings) -> list[str]:
    """On the order of the methods, on the targets right after conversion, and from scratch."""
    return [
        *order_sentences(experiment, findings.orders),
        *converted_sentences(experiment, findings),
        *scratch_sentences(experiment, findings),
    ]


def order_sentences(experiment: Experiment, orders: Sequence[Order]) -> list[str]:
    """Whether loss rises from method to method as the paper has it."""
    if not orders:
        return ["There are no two methods to compare."]
    shown = sum(order.shown for order in orders)
    chain = " < ".join(experiment.methods)
    of = f"{len(orders)} case{'s' * (len(orders) > 1)} (target and α)"
    if shown == len(orders):
        first = f"The paper's order of losses, {chain}, is shown in all {of}."
    elif shown:
        first = f"The paper's order of losses, {chain}, is shown in {shown} of {of}."
    else:
        first = (
            f"The paper's order of losses, {chain}, is not shown at this scale, in none of {of}."
        )
    return [
        first,
        *(_order_sentence(experiment, order) for order in orders),
        *_pair_sentences(experiment, orders),
    ]


def verdict(order: Order) -> str:
    """`shown`, `seen, not shown`, or `no: first, mean, random`: as the means rise."""
    if order.shown:
        return "shown"
    if order.in_order:
        return "seen, not shown"
    rising = [m for _, m in sorted(zip(order.means, order.methods, strict=True))]
    return f"no: {', '.join(rising)}"


def _order_sentence(experiment: Experiment, order: Order) -> str:
    p = "" if order.p_holm is None else f", {p_value(order.p_holm)}"
    return (
        f"{order.target}, α = {experiment.share(order.steps):g}: {verdict(order)} "
        f"(in {order.holds} of {order.n} seed{'s' * (order.n > 1)}{p})."
    )


def _pair_sentences(experiment: Experiment, orders: Sequence[Order]) -> list[str]:
    """On neighbours in the order, each pair with a test of its own."""
    pairs = [(order, d) for order in orders for d in order.neighbours]
    cases: dict[str, list[str]] = {}
    for order, d in pairs:
        if d.shown:
            which = f"{d.variant} {'above' if d.mean > 0 else 'below'} {d.baseline}"
            where = f"{order.target} at α = {experiment.share(order.steps):g}"
            cases.setdefault(which, []).append(where)
    count = sum(map(len, cases.values()))
    text = f"By tests of their own, {count} of {len(pairs)} pairs of neighbours in the order differ"
    return [
        text + "".join(f"; {which}: {', '.join(where)}" for which, where in cases.items()) + "."
    ]


def converted_sentences(experiment: Experiment, findings: Findings) -> list[str]:
    """How far each target is from the original before any training, and from the other ones."""
    lines = [_converted_sentence(experiment, c, findings.usable_loss) for c in findings.converted]
    return lines + [
        f"At α = 0, {d.variant} is {distance(d)} {d.baseline}{evidence(d)}."
        for d in findings.rivals
    ]


def _converted_sentence(experiment: Experiment, c: Converted, usable: float | None) -> str:
    d = c.difference
    text = (
        f"{c.target} by {c.method} at α = 0 is {distance(d)} its {d.baseline}{evidence(d)}, "
        f"{math.exp(d.mean):.2f} times its perplexity, where {d.baseline} was "
    )
    steps = f"of its {experiment.original_steps:,} steps"
    there = "before its first validation"
    text += there if c.as_after is None else f"after about {c.as_after:,.0f} {steps}"
    if usable is None:
        return f"{text}."
    word = "usable" if c.loss <= usable else "not usable"
    return (
        f"{text}: {word}, if usable means as good as {d.baseline} was after {USABLE:.0%} {steps} "
        f"({usable:.4f})."
    )


def scratch_sentences(experiment: Experiment, findings: Findings) -> list[str]:
    """The first method against training the target itself."""
    return [
        f"{target} by {experiment.methods[0]} at α = {experiment.share(steps):g} is {distance(d)} "
        f"{target} from scratch{evidence(d)}, which has seen {experiment.original_steps:,} steps, "
        f"not {experiment.original_steps + steps:,}."
        for target, found in findings.scratch.items()
        for steps, d in found
    ]


def distance(d: Difference) -> str:
    """`0.0634 nats above`."""
    return f"{nats(abs(d.mean))} nats {'below' if d.mean < 0 else 'above'}"


def evidence(d: Difference) -> str:
    """` (95% interval 0.0311 to 0.0957; n = 5, p = 0.016)`, and whether that shows it."""
    if d.n == 1:
        return " (n = 1, which says nothing about chance)"
    if d.interval is None or d.p is None:
        return f" (n = {d.n}, the same at every seed: chance cannot be judged)"
    low, high = d.interval if d.mean > 0 else (-d.interval[1], -d.interval[0])
    found = f"95% interval {nats(low)} to {nats(high)}; n = {d.n}, {p_value(d.p)}"
    return f" ({found})" if d.shown else f" ({found}: not shown)"
