"""`sweep.until`: adds as many seeds as the comparisons need.

It uses Stein's two stages: the spread of a difference over the first seeds says how many seeds an
interval of the requested width needs, and the sweep runs these. Nothing is tested in between, so no
difference becomes more likely to be stated.
Source: Stein 1945, Annals of Mathematical Statistics 16, 243-258.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import count, islice
from pathlib import Path

from gptattn.compare.finished_runs import Run, read_runs
from gptattn.compare.statistics import stein_seeds
from gptattn.errors import ConfigError
from gptattn.machine.disk import read_json, refuse_taken, write_json
from gptattn.runs.folder import RunFolder
from gptattn.runs.two_stages import NAME, TwoStages, variant_key
from gptattn.sweep.plan import Plan
from gptattn.sweep.stages import Results

FIELD = "sweep.until"
MIN_SEEDS = 5  # in the first stage; fewer estimate the deviation too poorly


class Until:
    """The seeds of the first stage, and those of the second, which follow from its results."""

    def __init__(self, home: Path, plans: Sequence[Plan]) -> None:
        """Take the plans' seeds as the first stage, or those that the sweep in `home` began with.

        Raises ConfigError for too few seeds, and if the plans lack a seed that the sweep began
        with: a second stage must not be taken for a first.
        """
        sweep = plans[0].cfg.sweep
        assert sweep.until is not None
        given = sorted({plan.cfg.seed for plan in plans})
        if len(given) < MIN_SEEDS:
            raise ConfigError(
                FIELD,
                f"{sweep.until:g} needs {MIN_SEEDS} seeds or more to start with, not {len(given)}; "
                "use seed=1,2,3,4,5",
            )
        before = read_json(home / NAME, TwoStages)
        if before is None:
            refuse_taken(home, "hydra.sweep.dir", NAME)
        if before is not None and not set(before.first) <= set(given):
            raise ConfigError(
                FIELD,
                f"{home} began with seed={','.join(map(str, before.first))}; use these, or "
                "another experiment_name",
            )
        self.home, self.half_width, self.most = home, sweep.until, sweep.max_seeds
        self.first = before.first if before else tuple(given)
        self.half_widths = before.half_widths if before else {}
        print(
            f"{FIELD}={sweep.until:g}: {len(self.first)} seeds of each variant, then as many as it "
            f"needs, up to {sweep.max_seeds}"
        )

    def decide(
        self, plans: Sequence[Plan], results: Results, taken: int | None
    ) -> dict[str, list[int]]:
        """Return the seeds of the second stage, by `variant_key`, and print why.

        They follow the first stage's, and skip `taken`. A variant gets no more seeds if its
        comparison needs more than `sweep.max_seeds`, or if it lacks seeds of the first stage.
        """
        first = len(self.first)
        done = {
            run.resolve(): variant_key(asdict(plan.cfg))
            for plan in plans
            if (run := results.get(plan.folder)) is not None
        }
        # The whole folder, like the report, whose correction is over all of its rows.
        found = read_runs([self.home])[0] if done else []
        # An extended run no longer has a result for its first budget.
        found = [run for run in found if not (run.provenance and run.provenance.budgets)]
        runs = [replace(run, folder=run.folder.resolve()) for run in found]
        runs = [run for run in runs if run.seed in self.first]
        ours: dict[str, list[Run]] = {}
        for run in runs:
            if run.folder in done:
                ours.setdefault(done[run.folder], []).append(run)
        ours = {k: own for k, own in ours.items() if {run.seed for run in own} >= {*self.first}}
        from gptattn.compare.comparison import compare  # imports pandas

        counts = dict.fromkeys(ours, first)
        for section in compare(runs).sections if ours else []:
            base = next(row for row in section.rows if row.name == section.baseline)
            for row in section.rows:
                d = row.difference
                both = [done.get(one.runs[0].folder, "") for one in (row, base)]
                if d is None or d.n < 2 or not {*both} <= ours.keys():
                    continue
                needs = stein_seeds(d.deviation, self.half_width, d.n, d.comparisons)
                name = f"{row.name} ({section.title})" if section.title else row.name
                if needs > self.most:
                    print(
                        f"{FIELD}: {name}: ±{self.half_width:g} needs about {needs:,} seeds, more "
                        f"than sweep.max_seeds={self.most}; none added"
                    )
                    continue
                more = f" needs {needs} seeds" if needs > first else " has enough seeds"
                print(f"{FIELD}: {name}{more}")
                for key in both:
                    counts[key] = max(counts[key], needs)
        lacking = [p.cfg.variant for p in plans if variant_key(asdict(p.cfg)) not in ours]
        if lacking:
            why = f"since not all of the first {first} have a result"
            print(f"{FIELD}: {', '.join(dict.fromkeys(lacking))}: no seeds added, {why}")
        # Record the first stage of these variants, as planned now and as recorded.
        recorded = [RunFolder(run.folder).read_record() for own in ours.values() for run in own]
        keys = sorted({*ours, *map(variant_key, recorded)})
        half_widths = self.half_widths | dict.fromkeys(keys, self.half_width)
        write_json(self.home / NAME, TwoStages(self.first, half_widths))
        free = (seed for seed in count(max(self.first) + 1) if seed != taken)
        later = list(islice(free, max(counts.values(), default=first) - first))
        return {key: later[: seeds - first] for key, seeds in counts.items() if seeds > first}
