"""The stages of a sweep: its runs, and the runs that wait for what those leave.

A second stage is an object with the methods of `Later`: `second_stage.py` has the one of
uptraining, `tuning.py` the one that trains each variant at its best learning rate.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from gptattn.machine.disk import check_room
from gptattn.runs.folder import RunFolder
from gptattn.sweep.ledger import Ledger
from gptattn.sweep.plan import (
    Found,
    Plan,
    folders_diverged,
    folders_done,
    in_round,
    with_resumable_folders,
)

DIVERGED_EVERYWHERE = "it diverged at every learning rate"


@dataclass
class Chosen:
    """The second stage's runs, and why others are skipped, by the folder of their plans."""

    plans: list[Plan]
    skipped: dict[Path, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)  # what was decided, to print
    diverged: int = 0  # variants whose runs are skipped for DIVERGED_EVERYWHERE


class Later(Protocol):
    """The second stage of a sweep."""

    @property
    def titles(self) -> tuple[str, str]:
        """What the first stage does, and the second."""
        ...

    @property
    def first_counts(self) -> bool:
        """Whether runs of the first stage are results, whose weights the second stage reads.

        Otherwise they only decide what the second one does, and one that diverged is an answer too.
        """
        ...

    @property
    def lost(self) -> str:
        """The words on runs that wait for others, after `2 ` and before ` were skipped`."""
        ...

    def candidates(self, first: Sequence[Plan], made: Mapping[Path, Path]) -> list[Plan]:
        """Return every plan that the second stage may turn out to need, checked.

        `made` maps the folder of a plan of the first stage to its finished run.
        """
        ...

    def expected(self, stages: "Stages") -> list[Plan]:
        """Choose as many candidates as will run, as far as is known before the first stage."""
        ...

    def chosen(self, stages: "Stages") -> Chosen:
        """Choose the candidates that can run now, after the first stage."""
        ...


@dataclass
class Stages:
    """All runs of a sweep, with those that exist."""

    found: Found
    first: list[Plan]
    candidates: list[Plan]
    second: list[Plan]  # those of the candidates that run, or will as far as is known
    lost: set[Path]  # folders of first-stage plans whose runs diverged, where that is an answer

    @property
    def everything(self) -> list[Plan]:
        """The plans of both stages."""
        return [*self.first, *self.second]

    @property
    def made(self) -> dict[Path, Path]:
        """The finished runs by the folders of their plans."""
        now = {plan.folder: plan.folder for plan in self.everything if is_done(plan)}
        return now | self.found.done

    def todo(self, plans: Sequence[Plan]) -> list[Plan]:
        """Return those of the plans that have neither a finished run nor one that diverged."""
        made = self.made
        return [p for p in plans if p.folder not in made and p.folder not in self.lost]

    def ended(self) -> int:
        """Count the plans that need no run any more."""
        return len(self.everything) - len(self.todo(self.everything))


def is_done(plan: Plan) -> bool:
    """Whether the plan's own folder holds a finished run."""
    return RunFolder(plan.folder).done


def stages_of(
    first: Sequence[Plan], ledger: Ledger, in_processes: bool, later: Later | None
) -> Stages:
    """Return the plans of both stages with their final folders, and the existing runs.

    Raises a UserError if the second stage cannot work or the disk has no room for the new runs.
    """
    sweep = first[0].cfg.sweep
    found = Found({}, {})

    def looked_up(plans: list[Plan], with_weights: bool = False) -> list[Plan]:
        if "round" in ledger.facts:
            plans = [in_round(plan, ledger.facts["round"]) for plan in plans]
        if sweep.fresh:
            return plans
        more = folders_done(plans, keep_stale=sweep.keep_stale, with_weights=with_weights)
        found.done.update(more.done)
        found.stale.update(more.stale)
        if not in_processes:
            return plans
        return with_resumable_folders(plans, found, keep_stale=sweep.keep_stale)

    begun = looked_up(list(first), later is not None and later.first_counts)
    stages = Stages(found, begun, [], [], set())
    if later is not None:
        if not later.first_counts and not sweep.fresh:
            stages.lost = folders_diverged([p for p in begun if p.folder not in found.done])
        stages.candidates = looked_up(later.candidates(begun, found.done))
        stages.second = later.expected(stages)
    # A resumed run already takes its room on the disk.
    new = [plan for plan in stages.todo(stages.everything) if not plan.begun]
    check_room(ledger.folder, sum(plan.bytes_on_disk for plan in new))
    return stages
