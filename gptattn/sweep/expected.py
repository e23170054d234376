"""Before a sweep's runs start: how they share the machine, and how long they will take."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from gptattn.machine.console import span
from gptattn.sweep.estimate import Estimate
from gptattn.sweep.ledger import Ledger
from gptattn.sweep.plan import Plan
from gptattn.sweep.sharing import Share, choice_for, is_open, quickest, shares
from gptattn.sweep.stages import Stages
from gptattn.sweep.vectorize import grouped


def expect(stages: Stages, estimate: Estimate, ledger: Ledger, console: Console) -> None:
    """Fill in how the runs share the machine, and their expected seconds if they can be had.

    Where several run at once, the longest of a seed come first, so that all end at about one time.
    """
    share, expected = _chosen(stages, estimate, ledger, console)
    together = min(share.jobs, len(grouped(stages.everything)))

    def timed(some: Sequence[Plan]) -> list[Plan]:
        known = [
            _with_jobs(replace(p, seconds=expected.get(p.folder), together=together), share.jobs)
            for p in some
        ]
        if share.jobs > 1:
            known.sort(key=lambda plan: (plan.cfg.seed, -(plan.seconds or 0.0)))
        return known

    stages.first, stages.second = timed(stages.first), timed(stages.second)
    stages.candidates = timed(stages.candidates)
    if stages.second and expected:
        total = sum(plan.seconds or 0.0 for plan in stages.todo(stages.everything))
        console.print(f"about {span(total / share.jobs)} in all")


def _chosen(
    stages: Stages, estimate: Estimate, ledger: Ledger, console: Console
) -> tuple[Share, dict[Path, float]]:
    """Return how the runs share the machine, and then each plan's seconds, by its folder; {}: not
    known. Where there was a choice, it is noted in the ledger and printed.
    """
    plans = [*stages.first, *stages.candidates]
    todo = [plan.folder for plan in stages.todo(stages.everything)]
    made_for = choice_for([plan.cfg for plan in stages.everything])
    before = ledger.jobs(made_for) if is_open(plans[0].cfg) else None
    ways = shares(plans[0].cfg, len(todo), before)
    if before is not None:
        console.print(f"sweep.jobs=auto: {ways[0]}, as chosen before", soft_wrap=True)
    timings = estimate([plan.cfg for plan in plans], ways)
    if timings is None:
        return ways[0], {}
    folders = [plan.folder for plan in plans]
    known = {way: dict(zip(folders, each, strict=True)) for way, each in timings.items()}
    share, gain = quickest({way: [own[f] for f in todo] for way, own in known.items()})
    if len(ways) > 1:
        ledger.note_jobs(share.jobs, made_for)
        better = f", {gain:.2f} times as fast as {ways[0]}" * (share != ways[0])
        lacking = "; there is no memory for more" * (len(known) < len(ways))
        console.print(f"sweep.jobs=auto: {share}{better}{lacking}", soft_wrap=True)
    return share, known[share]


def _with_jobs(plan: Plan, jobs: int) -> Plan:
    """Return the plan with this many runs at a time."""
    return replace(plan, cfg=replace(plan.cfg, sweep=replace(plan.cfg.sweep, jobs=jobs)))
