"""Finds uptrained runs: they start from another run's weights, with the attention converted.

Each share of uptraining steps makes a section: the originals, the variants converted from them by
each method, and the same variants from scratch. Source: Ainslie et al. 2023, arXiv:2305.13245,
sec. 2.1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from gptattn.compare.finished_runs import Run
from gptattn.compare.groups import Groups, group_runs
from gptattn.compare.sections import AXES, words_of
from gptattn.compare.setting_words import OF_ATTENTION
from gptattn.settings.config import INIT_METHODS

# The axes that an uptrained run must share with its original.
SHARED = [axis for axis in AXES if axis not in ("budget", "weights", "optim")]
OWN = (*OF_ATTENTION, "init_")  # settings in which a converted variant may differ from its original


@dataclass(frozen=True)
class Uptraining:
    """The runs uptrained from one group of originals for the same number of steps."""

    original: str  # the originals' group: the variant, and settings if several groups share it
    steps: int  # of uptraining
    share: float  # steps / the originals' steps: the paper's α
    groups: Groups  # the originals first, then the converted variants
    from_scratch: Groups  # the same variants trained from scratch; another section compares them
    pairs: list[tuple[str, str]]  # groups to compare: the second against the first
    warnings: list[str]

    @property
    def family(self) -> str:
        """Equal for sections that differ only in the share of steps."""
        return f"uptrained from {self.original}"

    @property
    def source(self) -> str:
        """Name of the originals' group, the baseline of the section."""
        return next(iter(self.groups))

    @property
    def title(self) -> str:
        """The section's title: family, steps and α."""
        before = self.groups[self.source][0].steps
        return f"{self.family}: {self.steps:,} steps after {before:,} (α = {self.share:g})"


def part_uptrained(runs: Sequence[Run]) -> tuple[list[Uptraining], list[Run]]:
    """Return one Uptraining per group of originals and number of steps, and all uptrained runs.

    If an original was repeated, only the newest run and the runs uptrained from it count.
    """
    origins = {run.origin for run in runs if run.origin}
    sources = group_runs([run for run in runs if run.folder.name in origins and run.steps])
    found, uptrained = [], []
    for name, originals in sources.items():
        by_name = {run.folder.name: run for run in originals}
        children = [
            run
            for run in runs
            if (original := by_name.get(run.origin)) is not None and _converted(run, original)
        ]
        for steps in sorted({run.steps for run in children}):
            members = [run for run in children if run.steps == steps]
            found.append(_uptraining(name, originals, members, runs))
        uptrained += children
    return found, uptrained


def _converted(run: Run, original: Run) -> bool:
    """Whether the run can be paired with its original: same seed and SHARED axes, other variant.

    With the same variant it continues its original and is no conversion.
    """
    alike = all(words_of(axis, run) == words_of(axis, original) for axis in SHARED)
    return alike and run.variant != original.variant and run.seed == original.seed


def method_of(run: Run) -> str:
    """Return the `init_method` by which the heads of a converted run were merged."""
    return run.settings.get("init_method", INIT_METHODS[0])


def rank_of(method: str) -> int:
    """Return the method's rank in the paper's order, by rising loss; other methods rank last."""
    return INIT_METHODS.index(method) if method in INIT_METHODS else len(INIT_METHODS)


def _uptraining(
    name: str, originals: list[Run], members: list[Run], runs: Sequence[Run]
) -> Uptraining:
    first, steps = originals[0], members[0].steps
    targets, same = {run.variant for run in members}, _settings_without(first, OWN)
    from_scratch = group_runs(
        [
            r
            for r in runs
            if r.variant in targets and not r.origin and _settings_without(r, OWN) == same
        ],
        lambda run: f"{run.variant} from scratch",
    )
    made = group_runs(members, lambda run: f"{run.variant} by {method_of(run)}")
    pairs = _pairs(made, from_scratch if steps else {})
    groups, share = {first.variant: originals, **made}, steps / first.steps
    return Uptraining(name, steps, share, groups, from_scratch, pairs, _changes(first, members))


def _settings_without(run: Run, without: tuple[str, ...]) -> dict[str, str]:
    return {key: value for key, value in run.settings.items() if not key.startswith(without)}


def _pairs(made: Groups, from_scratch: Groups) -> list[tuple[str, str]]:
    """Return the pairs to compare for each variant.

    These are neighbours in the paper's order of methods, and from scratch with the first method.
    """
    chains: dict[tuple[object, ...], list[tuple[int, str]]] = {}
    for name, (run, *_) in made.items():
        like = (run.variant, *sorted(_settings_without(run, ("init_method",)).items()))
        chains.setdefault(like, []).append((rank_of(method_of(run)), name))
    pairs = []
    for (variant, *_), chain in chains.items():
        names = [name for _, name in sorted(chain)]
        pairs += pairwise(names)
        pairs += [(own, names[0]) for own, (r, *_) in from_scratch.items() if r.variant == variant]
    return pairs


def _changes(original: Run, members: Sequence[Run]) -> list[str]:
    """Return a line for each further setting that differs between uptraining and the original."""
    before = _settings_without(original, (*OWN, "budget"))
    after = [_settings_without(run, (*OWN, "budget")) for run in members]
    lines = []
    for key in sorted(before.keys() | after[0].keys()):
        values = sorted({settings.get(key, "none") for settings in after})
        if values != [before.get(key, "none")]:
            had = f"uptraining used {key}={' and '.join(values)}"
            lines.append(f"{had}, the originals {before.get(key, 'none')}")
    return lines
