"""States in words, and in a table, what a ladder of sizes says."""

from gptattn.compare.ladder import BEYOND, LadderReport, Scaled
from gptattn.compare.scaling import Multiplier
from gptattn.compare.statistics import ALPHA
from gptattn.compare.table import MISSING
from gptattn.compare.verdicts import listed, p_value

NEEDS = {
    "compute": "the compute",
    "cache": "the cache per token",
    "seconds": "the seconds of training",
}
HEADINGS = {"compute": "compute", "cache": "cache", "seconds": "seconds"}


def title(report: LadderReport) -> str:
    """Return `Needed for the same loss: 5 sizes, 3 seeds`."""
    seeds = f"{report.seeds} seed{'s' * (report.seeds > 1)}"
    words = f"needed for the same loss: {len(report.sizes)} sizes, {seeds}"
    return f"{report.where}: {words}" if report.where else f"{words[0].upper()}{words[1:]}"


def sentences(report: LadderReport) -> list[str]:
    """Return a sentence per variant and cost, and what the law of compute is worth."""
    lines = [
        f"{name} needs {_times(found)} {NEEDS[scaled.cost]} of {report.baseline} for "
        f"{'the same loss' if scaled.shared else f'a loss of {scaled.loss:.4f}'}."
        for scaled in report.costs
        for name, found in scaled.multipliers.items()
    ]
    compute = report.costs[0]
    return [*lines, _prediction(report, compute), *_holds(report)]


def _times(found: Multiplier) -> str:
    if found.interval is None:
        return f"{found.value:.2f} times"
    low, high = found.interval
    return f"{found.value:.2f} ({low:.2f} to {high:.2f}) times"


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


def notes(report: LadderReport) -> list[str]:
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


def cells(report: LadderReport) -> list[list[str]]:
    """Return the cells of the table, heading row first: multipliers, and the prediction."""
    compute = report.costs[0]
    costs = [HEADINGS[scaled.cost] for scaled in report.costs]
    table = [["variant", *costs, "predicted", "measured", "error"]]
    for name, measured in compute.measured.items():
        times = [
            _cell(scaled.multipliers[name]) if name in scaled.multipliers else MISSING
            for scaled in report.costs
        ]
        predicted = compute.predicted[name]
        figures = [f"{predicted:.4f}", f"{measured:.4f}", f"{predicted - measured:+.4f}"]
        table.append([name, *times, *figures])
    return table


def _cell(found: Multiplier) -> str:
    return _times(found).removesuffix(" times")


def caption(report: LadderReport) -> str:
    """Say what the columns are."""
    return (
        f"times what {report.baseline} needs for the same loss, 95% intervals for each cost over "
        "its variants; predicted: the loss at the largest size, from the smaller ones"
    )
