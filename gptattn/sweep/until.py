"""`sweep.until`: after the seeds that were given, as many more as the comparisons need.

Stein's two stages: the spread of a difference over the first seeds says how many an interval of the
asked width needs, and those are run. No difference is looked at before, so no claim gets likelier.
Source: Stein 1945, Annals of Mathematical Statistics 16, 243-258.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import Any

from gptattn.compare.comparison import compare
from gptattn.compare.extended import at_first_budgets
from gptattn.compare.finished_runs import Run, read_runs
from gptattn.compare.results import Section
from gptattn.compare.statistics import stein_seeds
from gptattn.errors import ConfigError
from gptattn.machine.console import make_console, span
from gptattn.runs.folder import RunFolder
from gptattn.runs.two_stages import TwoStages, read_two_stages, variant_key, write_two_stages
from gptattn.settings.config import TrainConfig
from gptattn.sweep.jobs import Jobs, with_seeds
from gptattn.sweep.plan import Plan
from gptattn.sweep.replaced import cell_of
from gptattn.sweep.stages import Among, Stages, share_machine

FIELD = "sweep.until"
FEWEST = 5  # first seeds: with fewer, the deviation is known too badly to plan by


@dataclass(frozen=True)
class Need:
    """The seeds that a variant and its baseline need, by the keys of the two."""

    name: str  # as in the report, with its section
    keys: tuple[str, str]
    seeds: int


@dataclass(frozen=True)
class Decision:
    """The second stage: how many seeds each variant gets in all, by its key."""

    counts: Mapping[str, int]  # of the variants that get more than the first stage's
    whole: Set[str]  # the variants that have all seeds of the first stage; others get no more
    seeds: list[int]  # in order, the first stage's first: a variant gets the first so many
    first: int  # of the seeds, those of the first stage
    lines: list[str]  # what was decided, to print

    def chosen(self, plans: Sequence[Plan]) -> list[Plan]:
        """Return the plans whose variant gets their seed."""
        return [
            plan
            for plan in plans
            if (key := _key(plan.cfg)) in self.whole
            and self.seeds.index(plan.cfg.seed) < self.counts.get(key, self.first)
        ]


def until_stages(
    home: Path, jobs: Jobs, kind: Callable[[Jobs, Among], Stages], tune: Mapping[str, Any] | None
) -> Stages:
    """Run the seeds that were given, then as many more as each comparison needs.

    `kind` returns the stages of some jobs. Raises ConfigError for too few seeds, for nothing to
    compare, and for results of other code.
    """
    taken = {tune["seed"]} if tune is not None and "seed" in tune else set()
    until = Until(home, taken)
    codes = yield from _noting(kind(jobs, until.begin), until)
    if len(until.results) < 2:
        return codes
    decision = until.decide()
    make_console().print("\n".join(decision.lines), markup=False, soft_wrap=True)
    if decision.counts:
        codes += yield from kind(with_seeds(jobs, decision.seeds), decision.chosen)
    return codes


def _noting(stages: Stages, until: "Until") -> Stages:
    """Yield the stages; note the results of those that count."""
    stage = next(stages)
    while True:
        results = yield stage
        if stage.counts:
            until.results = [
                (plan, results.done[plan.folder])
                for plan in stage.plans
                if plan.folder in results.done
            ]
        try:
            stage = stages.send(results)
        except StopIteration as end:
            return end.value


class Until:
    """A sweep in a folder that goes on until it is decided."""

    def __init__(self, folder: Path, taken: Collection[int]) -> None:
        """`taken` are seeds that are not to be compared."""
        self._folder, self._taken = folder, taken
        self.results: list[tuple[Plan, Path]] = []  # of the first seeds
        self._plans: list[Plan] = []
        self._before: TwoStages | None = None
        self._first: tuple[int, ...] = ()
        self._half_width = 0.0

    def begin(self, plans: list[Plan]) -> list[Plan]:
        """Note the first stage: the plans' seeds, or those that the sweep once began with.

        Print what will be, and return the plans. Raises ConfigError for too few seeds, or nothing
        to compare, and for results of other code.
        """
        sweep = plans[0].cfg.sweep
        if {plan.cfg.sweep.until for plan in plans} != {sweep.until}:
            raise ConfigError(FIELD, "is one number for the whole sweep; give one")
        assert sweep.until is not None
        given = sorted({plan.cfg.seed for plan in plans})
        if len(given) < FEWEST:
            raise ConfigError(
                FIELD,
                f"{sweep.until:g} needs {FEWEST} seeds or more to begin with, not {len(given)}; "
                f"give seed={_listed(range(1, FEWEST + 1))}",
            )
        if len(given) > sweep.max_seeds:
            raise ConfigError(
                "sweep.max_seeds",
                f"{sweep.max_seeds} is less than the {len(given)} seeds given; give that or more",
            )
        if sweep.keep_stale:
            raise ConfigError(
                FIELD, "has no place beside sweep.keep_stale: more seeds would be of other code"
            )
        if len({self._variant(plan.cfg) for plan in plans}) < 2:
            raise ConfigError(FIELD, f"{sweep.until:g} has one variant; give several to compare")
        before = read_two_stages(self._folder)
        if before is not None and not set(before.first) <= set(given):
            raise ConfigError(
                FIELD,
                f"{self._folder} began with seed={_listed(before.first)}; give these, or another "
                "experiment_name",
            )
        self._plans, self._before = plans, before
        self._first, self._half_width = before.first if before else tuple(given), sweep.until
        make_console().print(
            f"{FIELD}={sweep.until:g}: {len(self._first)} seeds of each variant, then as many more "
            f"as it needs, up to {sweep.max_seeds}",
            soft_wrap=True,
        )
        return plans

    def decide(self) -> Decision:
        """Say how many seeds each variant gets, from the finished runs of the first stage.

        A variant whose comparison needs more than `sweep.max_seeds`, or that lacks seeds of the
        first stage, keeps those it has.
        """
        first, most = len(self._first), self._plans[0].cfg.sweep.max_seeds
        keys = {folder.resolve(): _key(plan.cfg) for plan, folder in self.results}
        # All of the folder, as the report: its correction is over every row that is there.
        found = read_runs([self._folder])[0]
        # Runs that were extended since count as they were at first; the longer ones come last.
        done = at_first_budgets(found)[0][: len(found)]
        runs = [replace(run, folder=run.folder.resolve()) for run in done]
        runs = [run for run in runs if run.seed in self._first]
        seeds_of: dict[str, set[int]] = {}
        for run in runs:
            if run.folder in keys:
                seeds_of.setdefault(keys[run.folder], set()).add(run.seed)
        whole = {key for key, seeds in seeds_of.items() if seeds.issuperset(self._first)}
        keys = {folder: key for folder, key in keys.items() if key in whole}
        sections = compare(runs, split=True).sections if keys else []
        needs = [need for each in sections for need in self._needs(each, keys)]
        within = [need for need in needs if first < need.seeds <= most]
        runs = [run for run in runs if run.folder in keys]
        counts: dict[str, int] = {}
        for need in within:
            for key in need.keys:
                counts[key] = max(counts.get(key, 0), need.seeds)
        together = share_machine([plan.cfg for plan in self._plans])[0]
        seconds = _seconds(runs, keys)
        lines = [f"{FIELD}={self._half_width:g}: {_summary(needs, within, first)}"]
        if counts:
            more = {key: seeds - first for key, seeds in counts.items()}
            took = sum(runs * seconds.get(key, 0.0) for key, runs in more.items()) / together
            about = f", about {span(took)}" if took else ""
            lines.append(f"with the baseline's, {sum(more.values())} more runs{about}")
        lines += [self._not_run(need, seconds, together) for need in needs if need.seeds > most]
        lines += self._lacking(whole)
        self._write(runs, keys)
        free = (seed for seed in count(max(self._first) + 1) if seed not in self._taken)
        seeds = [*self._first, *islice(free, max([first, *counts.values()]) - first)]
        return Decision(counts, whole, seeds, first, lines)

    def _lacking(self, whole: Set[str]) -> list[str]:
        """Say which variants lack some of the first seeds; the baseline may be one of them."""
        known = {self._variant(plan.cfg) for plan in self._plans if _key(plan.cfg) in whole}
        names = {p.cfg.variant: None for p in self._plans if self._variant(p.cfg) not in known}
        return [
            f"{', '.join(names)}: without all of the first {len(self._first)} seeds, no more are "
            "run of it, nor to compare others with it"
        ] * bool(names)

    def _variant(self, cfg: TrainConfig) -> str:
        """Return the key of a variant, which is one at whatever rates it is to choose from."""
        return cell_of(asdict(cfg)) if self._taken else _key(cfg)

    def _needs(self, section: Section, keys: Mapping[Path, str]) -> list[Need]:
        base = next(row for row in section.rows if row.name == section.baseline)
        found = []
        for row in section.rows:
            d = row.difference
            both = [keys.get(one.runs[0].folder) for one in (row, base)]
            if d is not None and d.n > 1 and both[0] is not None and both[1] is not None:
                where = f" ({section.title})" if section.title else ""
                seeds = stein_seeds(d.deviation, self._half_width, d.n, d.comparisons)
                found.append(Need(f"{row.name}{where}", (both[0], both[1]), seeds))
        return found

    def _not_run(self, need: Need, seconds: Mapping[str, float], jobs: int) -> str:
        """Return `gqa: ±0.005 would need about 280 seeds, 9 hours; not run (...)`."""
        each = sum(seconds.get(key, 0.0) for key in need.keys)
        hours = f", {span(each * (need.seeds - len(self._first)) / jobs)}" if each else ""
        return (
            f"{need.name}: ±{self._half_width:g} would need about {need.seeds:,} seeds{hours}; not "
            f"run (sweep.max_seeds={self._plans[0].cfg.sweep.max_seeds})"
        )

    def _write(self, runs: Sequence[Run], keys: Mapping[Path, str]) -> None:
        """Note the first stage for these runs' variants, as asked for and as recorded."""
        recorded = {variant_key(RunFolder(run.folder).read_settings()) for run in runs}
        now = recorded | {keys[run.folder] for run in runs}
        before = self._before.half_widths if self._before else {}
        half_widths = before | dict.fromkeys(sorted(now), self._half_width)
        write_two_stages(self._folder, TwoStages(self._first, half_widths))


def _key(cfg: TrainConfig) -> str:
    return variant_key(asdict(cfg))


def _summary(needs: Sequence[Need], within: Sequence[Need], first: int) -> str:
    if not needs:
        return "no two variants can be compared"
    if not any(need.seeds > first for need in needs):
        return f"the first {first} seeds decide it"
    if not within:
        return "no more seeds are run"
    enough = sum(need.seeds <= first for need in needs)
    rest = (
        f"; for {enough} other{'s' * (enough > 1)}, the first {first} are enough" if enough else ""
    )
    return ", ".join(f"{need.name} needs {need.seeds} seeds" for need in within) + rest


def _seconds(runs: Sequence[Run], keys: Mapping[Path, str]) -> dict[str, float]:
    """Return the mean seconds of training of each variant's runs."""
    found: dict[str, list[float]] = {}
    for run in runs:
        seconds = run.metrics.get("progress/seconds")
        if isinstance(seconds, int | float):
            found.setdefault(keys[run.folder], []).append(seconds)
    return {key: sum(own) / len(own) for key, own in found.items()}


def _listed(seeds: Iterable[int]) -> str:
    return ",".join(map(str, seeds))
