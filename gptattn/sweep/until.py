"""`sweep.until`: after the seeds that were given, as many more as the comparisons need.

Stein's two stages: the spread of a difference over the first seeds says how many an interval of the
asked width needs, and those are run. No difference is looked at before, so no claim gets likelier.
Source: Stein 1945, Annals of Mathematical Statistics 16, 243-258.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count, islice
from pathlib import Path

from gptattn.compare.comparison import compare
from gptattn.compare.finished_runs import Run, read_runs
from gptattn.compare.results import Difference, Section
from gptattn.compare.statistics import stein_seeds
from gptattn.errors import ConfigError
from gptattn.machine.console import make_console, span
from gptattn.runs.folder import RunFolder
from gptattn.runs.two_stages import FirstStage, read_first_stage, write_first_stage
from gptattn.settings.config import SweepConfig, TrainConfig
from gptattn.settings.identity import settings_key
from gptattn.sweep.ledger import CHOSEN, read_ledger
from gptattn.sweep.plan import Plan
from gptattn.sweep.replaced import cell_of
from gptattn.sweep.sharing import is_open, slots

FIELD = "sweep.until"
FEWEST = 5  # first seeds: with fewer, the deviation is known too badly to plan by


@dataclass(frozen=True)
class Need:
    """The seeds that a variant and its baseline need, by their settings without seed."""

    words: str  # `gqa needs 28`
    keys: tuple[str, str]
    seeds: int


@dataclass(frozen=True)
class Decision:
    """The second stage: how many seeds each variant gets in all, by its settings without seed."""

    counts: Mapping[str, int]  # of the variants that get more than the first stage's
    seeds: list[int]  # in order, the first stage's first: a variant gets the first so many
    first: int  # of the seeds, those of the first stage
    together: int  # runs at a time, as before
    lines: list[str]  # what was decided, to print

    def chosen(self, plans: Sequence[Plan]) -> list[Plan]:
        """Return the plans whose variant gets their seed."""
        return [
            plan
            for plan in plans
            if self.seeds.index(plan.cfg.seed) < self.counts.get(_key(plan.cfg), self.first)
        ]


class Until:
    """A sweep in a folder that goes on until it is decided."""

    def __init__(self, folder: Path, taken: Collection[int]) -> None:
        """`taken` are seeds that are not to be compared."""
        self._folder, self._taken = folder, taken
        self._plans: list[Plan] = []
        self._stage = FirstStage((), 0.0)

    def begin(self, plans: list[Plan]) -> list[Plan]:
        """Note the first stage: the plans' seeds, or those that the sweep once began with.

        Print what will be, and return the plans. Raises ConfigError for too few seeds, or nothing
        to compare.
        """
        sweep = plans[0].cfg.sweep
        assert sweep.until is not None
        given = sorted({plan.cfg.seed for plan in plans})
        _check_seeds(sweep, given)
        # One variant at several rates to choose from is one.
        key = _cell if self._taken else _key
        if len({key(plan.cfg) for plan in plans}) < 2:
            raise ConfigError(FIELD, f"{sweep.until:g} has one variant; give several to compare")
        before = read_first_stage(self._folder)
        if before is not None and not set(before.first) <= set(given):
            raise ConfigError(
                FIELD,
                f"{self._folder} began with seed={_listed(before.first)}; give these, or another "
                "experiment_name",
            )
        self._plans = plans
        self._stage = FirstStage(before.first if before else tuple(given), sweep.until)
        first = len(self._stage.first)
        make_console().print(
            f"{FIELD}={sweep.until:g}: {first} seeds of each variant, then as many more as it "
            f"needs, up to {sweep.max_seeds}",
            soft_wrap=True,
        )
        return plans

    def decide(self, results: Sequence[Path]) -> Decision:
        """Say how many seeds each variant gets, from the finished runs of the first stage.

        A variant whose comparison needs more than `sweep.max_seeds` keeps those it has.
        """
        stage, most = self._stage, self._plans[0].cfg.sweep.max_seeds
        runs = [run for run in read_runs(results)[0] if run.seed in stage.first]
        needs = [
            need for each in compare(runs, split=True).sections for need in _needs(each, stage)
        ]
        within = [need for need in needs if len(stage.first) < need.seeds <= most]
        counts: dict[str, int] = {}
        for need in within:
            for key in need.keys:
                counts[key] = max(counts.get(key, 0), need.seeds)
        together = self._together()
        seconds = _seconds(self._folder, runs)
        lines = [f"{FIELD}={stage.half_width:g}: {_summary(needs, within, len(stage.first))}"]
        lines += [
            _not_run(need, stage, most, seconds, together) for need in needs if need.seeds > most
        ]
        write_first_stage(self._folder, stage)
        free = (seed for seed in count(max(stage.first) + 1) if seed not in self._taken)
        first = len(stage.first)
        seeds = [*stage.first, *islice(free, max([first, *counts.values()]) - first)]
        return Decision(counts, seeds, first, together, lines)

    def _together(self) -> int:
        """Return how many runs the sweep has at a time: its newest choice, where it chooses."""
        cfg = self._plans[0].cfg
        chosen = [
            line["jobs"]
            for line in read_ledger(self._folder)
            if line.get("state") == CHOSEN and isinstance(line.get("jobs"), int)
        ]
        return chosen[-1] if is_open(cfg) and chosen else slots(cfg)


def _check_seeds(sweep: SweepConfig, given: Sequence[int]) -> None:
    if len(given) < FEWEST:
        raise ConfigError(
            FIELD,
            f"{sweep.until:g} needs {FEWEST} seeds or more to begin with, not {len(given)}; give "
            f"seed={_listed(range(1, FEWEST + 1))}",
        )
    if len(given) > sweep.max_seeds:
        raise ConfigError(
            "sweep.max_seeds",
            f"{sweep.max_seeds} is less than the {len(given)} seeds given; give that or more",
        )


def _cell(cfg: TrainConfig) -> str:
    return cell_of(asdict(cfg))


def _key(cfg: TrainConfig) -> str:
    """Return a key that is equal for settings that differ only in the seed."""
    return settings_key(asdict(replace(cfg, seed=0)))


def _needs(section: Section, stage: FirstStage) -> list[Need]:
    base = next(row for row in section.rows if row.name == section.baseline)
    found = []
    for row in section.rows:
        d = row.difference
        if d is not None and d.n > 1:
            where = f" ({section.title})" if section.title else ""
            seeds = _seeds(d, stage)
            keys = (_recorded_key(row.runs[0]), _recorded_key(base.runs[0]))
            words = f"{row.name}{where} needs {seeds} seeds"
            found.append(Need(words, keys, seeds))
    return found


def _seeds(d: Difference, stage: FirstStage) -> int:
    return stein_seeds(d.deviation, stage.half_width, d.n, d.comparisons)


def _recorded_key(run: Run) -> str:
    return settings_key(RunFolder(run.folder).read_settings() | {"seed": 0})


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
    return ", ".join(need.words for need in within) + rest


def _not_run(
    need: Need, stage: FirstStage, most: int, seconds: Mapping[str, float], jobs: int
) -> str:
    """Return `gqa: ±0.005 would need about 280 seeds, 9 hours; not run (sweep.max_seeds=50)`."""
    name = need.words.partition(" needs ")[0]
    each = sum(seconds.get(key, 0.0) for key in need.keys)
    hours = f", {span(each * (need.seeds - len(stage.first)) / jobs)}" if each else ""
    return (
        f"{name}: ±{stage.half_width:g} would need about {need.seeds:,} seeds{hours}; not run "
        f"(sweep.max_seeds={most})"
    )


def _seconds(folder: Path, runs: Sequence[Run]) -> dict[str, float]:
    """Return the mean seconds of a run by its settings without seed, from the sweep's ledger."""
    process: dict[object, object] = {}
    took: dict[object, float] = {}
    for entry in read_ledger(folder):
        if entry.get("state") == "running":
            process[entry["run"]] = entry.get("pid")
        elif entry.get("state") == "done" and isinstance(entry.get("seconds"), int | float):
            took[entry["run"]] = entry["seconds"]
    together = Counter(process.get(run) for run in took)  # runs of one process share its seconds
    found: dict[str, list[float]] = {}
    for run in runs:
        if run.folder.name in took:
            own = took[run.folder.name] / together[process.get(run.folder.name)]
            found.setdefault(_recorded_key(run), []).append(own)
    return {key: sum(own) / len(own) for key, own in found.items()}


def _listed(seeds: Iterable[int]) -> str:
    return ",".join(map(str, seeds))
