"""The smallest difference in loss that a sweep can show, stated before it starts."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from statistics import variance

from gptattn.compare.finished_runs import Match, Run, read_runs
from gptattn.compare.statistics import smallest_difference
from gptattn.errors import DataError
from gptattn.runs.folder import find_done
from gptattn.settings.identity import budget_words, flat, places, result_settings
from gptattn.sweep.plan import Plan

# Standard deviation of final losses over seeds, in nats: model=tiny, 1,000 steps, default data.
TYPICAL_DEVIATION = 0.02
MIN_DEGREES = 4  # degrees of freedom; with fewer, use TYPICAL_DEVIATION
MAX_READ = 200  # finished runs to read, newest first
ENOUGH_SEEDS = 5  # seeds to suggest for a sweep with one
ALIKE = ("model", "budget", "batch_size", "block")  # axes on which runs vary alike over seeds


def describe_design(plans: Sequence[Plan], folder: Path) -> list[str]:
    """Return one line per section of the report to come, on the difference that its seeds can show.

    The deviation over seeds comes from finished runs of the same size, data and budget in the
    sweep's folder and its sibling folders; with too few of them it is TYPICAL_DEVIATION.
    """
    from gptattn.compare.groups import comparable_sets  # imports pandas

    there = {*find_done(folder), *find_done(folder.parent, levels=2)}
    newest = sorted(there, key=lambda run: run.done_at)[-MAX_READ:]
    finished: list[Run] = []
    with suppress(DataError):  # there is none
        finished = read_runs([run.path for run in newest])[0]
    sections = comparable_sets([_foresee_run(plan) for plan in plans], split=True)
    # Sections with the same design give the same line: keep one.
    return list(dict.fromkeys(_describe_section(one.runs, finished) for one in sections))


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


def _describe_section(runs: Sequence[Run], finished: Sequence[Run]) -> str:
    seeds: dict[str, set[int]] = {}
    for run in runs:
        seeds.setdefault(f"{run.variant} {run.settings}", set()).add(run.seed)
    n, comparisons = len(set.intersection(*seeds.values())), len(seeds) - 1
    if not comparisons:
        return "one variant: nothing to compare"
    deviation, source = _estimate_deviation(runs[0], finished)
    # Two variants at one seed are nearly independent runs.
    found = smallest_difference(math.sqrt(2) * deviation, n if n > 1 else ENOUGH_SEEDS, comparisons)
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


def _estimate_deviation(planned: Run, finished: Sequence[Run]) -> tuple[float, str]:
    """Return the standard deviation of final losses over seeds, and its source in words."""
    from gptattn.compare.groups import group_runs, words_of

    def describe(run: Run) -> list[str | None]:
        text = [run.places.get("data.path"), run.choices.get("data"), run.choices.get("tokenizer")]
        return [*text, *(words_of(axis, run) for axis in ALIKE)]

    similar = [run for run in finished if describe(run) == describe(planned)]
    groups = group_runs(similar).values() if len(similar) > MIN_DEGREES else ()
    spread = [[run.metrics["val/loss"] for run in runs] for runs in groups if len(runs) > 1]
    degrees = sum(len(losses) - 1 for losses in spread)
    if degrees < MIN_DEGREES:
        return TYPICAL_DEVIATION, (
            f"if losses vary over seeds as at model=tiny after 1,000 steps (standard deviation "
            f"{TYPICAL_DEVIATION:g} nats)"
        )
    pooled = sum((len(losses) - 1) * variance(losses) for losses in spread) / degrees
    deviation, runs = math.sqrt(pooled), sum(map(len, spread))
    return (
        deviation,
        f"judging by {runs} finished runs like these (standard deviation {deviation:.2g} nats)",
    )
