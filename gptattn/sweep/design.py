"""The smallest difference in loss that a sweep can show, stated before it starts."""

import math
from collections.abc import Sequence
from dataclasses import asdict

from gptattn.compare.finished_runs import Match, Run
from gptattn.compare.statistics import smallest_difference
from gptattn.settings.identity import budget_words, flat, places, result_settings
from gptattn.sweep.plan import Plan

# Standard deviation of final losses over seeds, in nats: model=tiny, 1,000 steps, default data.
TYPICAL_DEVIATION = 0.02
ENOUGH_SEEDS = 5  # seeds to suggest for a sweep with one


def describe_design(plans: Sequence[Plan]) -> list[str]:
    """Return one line per section of the report to come, on the difference that its seeds can show.

    It assumes that losses vary over seeds by TYPICAL_DEVIATION.
    """
    from gptattn.compare.groups import comparable_sets  # imports pandas

    sections = comparable_sets([_foresee_run(plan) for plan in plans], split=True)
    # Sections with the same design give the same line: keep one.
    return list(dict.fromkeys(_describe_section(one.runs) for one in sections))


def _foresee_run(plan: Plan) -> Run:
    """Return the run as the report will read it, without its results."""
    cfg, settings = plan.cfg, flat(asdict(plan.cfg))
    return Run(
        plan.folder,
        cfg.variant,
        cfg.seed,
        {},
        result_settings(settings),
        budget_words(settings),
        {"text_sha256": plan.provenance.text},
        match=None if cfg.match_made is None else Match(**cfg.match_made),
        choices=cfg.choices,
        origin=cfg.init_from or "",
        places=places(settings),
    )


def _describe_section(runs: Sequence[Run]) -> str:
    seeds: dict[str, set[int]] = {}
    for run in runs:
        seeds.setdefault(f"{run.variant} {run.settings}", set()).add(run.seed)
    n, comparisons = len(set.intersection(*seeds.values())), len(seeds) - 1
    if not comparisons:
        return "one variant: nothing to compare"
    # Two variants at one seed are nearly independent runs.
    deviation = math.sqrt(2) * TYPICAL_DEVIATION
    found = smallest_difference(deviation, n if n > 1 else ENOUGH_SEEDS, comparisons)
    source = (
        f"if losses vary over seeds as at model=tiny after 1,000 steps (standard deviation "
        f"{TYPICAL_DEVIATION:g} nats)"
    )
    design = f"{n} seed{'s' * (n != 1)}, {comparisons} comparison{'s' * (comparisons > 1)}"
    if n > 1:
        return (
            f"{design}: differences of about {found:.2g} nats or more would be shown with "
            f"80% power, {source}"
        )
    more = ",".join(str(seed) for seed in range(1, ENOUGH_SEEDS + 1))
    return (
        f"{design}: no difference can be shown, however large; seed={more} would show those of "
        f"about {found:.2g} nats or more with 80% power, {source}"
    )
