"""The battery: one table of `experiment=battery` runs and the shipped results, by task.

The file reads downwards: the tasks, results from runs or from files in benchmarks/battery, then the
table. `plots.py` has the figures.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev

import yaml

from gptattn import command
from gptattn.compare.finished_runs import Run
from gptattn.compare.rows import RATE
from gptattn.compare.table import MISSING, Table
from gptattn.compare.track import CountCaches, StoredEntry, group_runs, list_regime
from gptattn.errors import DataError
from gptattn.machine.source_code import hash_of
from gptattn.runs.folder import LOADER
from gptattn.runs.metrics import ACCURACY, PARAMS, SLICE, SOLVED
from gptattn.settings.config import CONF, TrainConfig
from gptattn.settings.identity import flat, result_settings

SEEDS = 3  # of each task
RECALL = "mixed recall"  # the task to plot against effective compute
CONTEXT = "model.context_length"


@dataclass(frozen=True)
class BatteryTask:
    """A task of the experiment, as it is today."""

    facts: Mapping[str, str]  # the settings of its runs, and the hash of its rows
    length: int  # tokens in the rows whose accuracy counts
    metric: str  # that accuracy


def read_tasks(hash_rows: Callable[[TrainConfig], str]) -> dict[str, BatteryTask]:
    """Return the tasks of conf/experiment/battery.yaml, by name."""
    from gptattn.settings.compose import settings  # imports Hydra

    file = CONF / "experiment" / "battery.yaml"
    sweeper = yaml.load(file.read_text(encoding="utf-8"), LOADER)["hydra"]["sweeper"]
    tasks = {}
    for variant in sweeper["variants"]:
        cfg = settings(["experiment=battery", *variant.split()])
        facts = _list_facts(result_settings(flat(asdict(cfg))), hash_rows(cfg))
        for derived in ("tokenizer.vocab_size", "validation.tokens"):  # a run derives it from rows
            facts.pop(derived, None)
        longest = max(cfg.validation.lengths, default=None)
        metric = ACCURACY if longest is None else f"{SLICE}{longest}"
        name = _name_task(cfg.choices, facts)
        tasks[name] = BatteryTask(facts, longest or cfg.model.context_length, metric)
    return tasks


def _list_facts(settings: Mapping[str, str], rows: str) -> dict[str, str]:
    return list_regime(settings) | {"budget": settings["budget"], "rows": rows}


def _name_task(choices: Mapping[str, str], facts: Mapping[str, str]) -> str:
    data = choices.get("data", "no task")
    return facts["data.group"].upper() if data == "permutations" else data.replace("_", " ")


class Result(StoredEntry, frozen=True, omit_defaults=True):
    """The results of an entry's runs on one task."""

    name: str
    task: str
    rate: float
    steps: dict[int, int]  # by seed
    accuracies: dict[int, dict[str, float]]  # by seed, then metric: overall, by length, by slice
    chance: float  # the accuracy of guessing
    params: int
    cache: int | None  # bytes for a trained row in half precision; None: no cache
    facts: dict[str, str]


def read_results(runs: Sequence[Run], count_caches: CountCaches) -> list[Result]:
    """Return the results of the runs, the newest first."""
    results = []
    for name, members in group_runs(runs):
        own = sorted(members, key=lambda run: run.seed)
        first, provenance = own[0], own[0].provenance
        facts = _list_facts(first.settings, provenance.text if provenance else "")
        cache = count_caches(first.folder, [int(facts[CONTEXT])])
        result = Result(
            name=name,
            task=_name_task(first.choices, facts),
            rate=float(first.settings[RATE]),
            steps={run.seed: run.steps for run in own},
            accuracies={
                run.seed: {k: v for k, v in run.metrics.items() if k.startswith(ACCURACY)}
                for run in own
            },
            chance=float(first.data.get("chance", 0)),
            params=round(first.metrics[PARAMS]),
            cache=cache[0] if cache else None,
            code={**provenance.code} if provenance else {"unknown": ""},
            facts=facts,
        )
        results.append(result)
    return results


@dataclass(frozen=True)
class Battery:
    """The table: each row's results by task, the best row first, and the results left out."""

    tasks: Mapping[str, BatteryTask]
    rows: Mapping[str, Mapping[str, Result]]
    left_out: Mapping[str, Sequence[str]]  # reason -> results

    @property
    def entries(self) -> list[Result]:
        """The results that the table shows."""
        return [result for row in self.rows.values() for result in row.values()]

    def list_accuracies(self, name: str, task: str, *, trained: bool = False) -> list[float]:
        """Return a row's accuracies on a task, one per seed that has a result.

        `trained`: in rows as long as in training, which can be shorter than those that count.
        """
        metric = ACCURACY if trained else self.tasks[task].metric
        result = self.rows.get(name, {}).get(task)
        found = result.accuracies.values() if result else ()
        return [own[metric] for own in found if metric in own]

    def score(self, name: str) -> tuple[float, float]:
        """Return the share of seeds that solve a task, and the accuracy, as means over tasks."""
        accuracies = [self.list_accuracies(name, task) for task in self.tasks]
        filled = [[*own, *[0.0] * (SEEDS - len(own))] for own in accuracies]  # missing count as 0
        return fmean(fmean(x >= SOLVED for x in own) for own in filled), fmean(map(fmean, filled))


def make_battery(
    results: Sequence[Result], tasks: Mapping[str, BatteryTask], holds: Callable[[Result], bool]
) -> Battery:
    """Return the table of those results that are of the current experiment and code.

    Of several with the same name and task, the first counts. `holds`: as for the track. Raises
    DataError if no row remains.
    """
    rows: dict[str, dict[str, Result]] = {}
    left_out: dict[str, list[str]] = {}
    alone = all(one.is_shipped for one in results)
    for result in results:
        if (row := rows.setdefault(result.name, {})).get(result.task):
            why = "" if result.is_shipped else "a newer one has the same name"
        elif not (why := _describe_mismatch(result, tasks)):
            if alone or not result.is_shipped or holds(result):
                row[result.task] = result
            else:
                why = "no longer gives the shipped losses with this code"
        if why:
            left_out.setdefault(why, []).append(f"{result.name} on {result.task}")
    found = Battery(tasks, {name: row for name, row in rows.items() if row}, left_out)
    if not found.rows:
        why = "".join(f"; {', '.join(own)}: {why}" for why, own in left_out.items())
        train = f"train some: {command('train')} -m experiment=battery attn=mha"
        raise DataError("battery", f"has no results to show{why}; {train}")
    best = sorted(found.rows, key=found.score, reverse=True)
    return Battery(tasks, {name: rows[name] for name in best}, left_out)


def _describe_mismatch(result: Result, tasks: Mapping[str, BatteryTask]) -> str:
    """Return why a result is not of the current experiment or code; "" if it is."""
    if result.task not in tasks:
        return "not one of the tasks"
    today, facts = tasks[result.task].facts, result.facts  # a setting can be newer than a result
    if changed := [key for key, value in today.items() if facts.get(key, value) != value]:
        return f"different settings ({', '.join(changed[:3])})"
    if code := [module for module, digest in result.code.items() if hash_of(module) != digest]:
        return f"different code ({', '.join(code[:3])})"
    return "its mathematics has changed since it was shipped" if result.stale else ""


def battery_table(battery: Battery) -> Table:
    """Return the table, with notes on how to read it."""
    cells, lacks = [["entry", *battery.tasks, "cache", "params"]], []
    for name, row in battery.rows.items():
        found = {task: battery.list_accuracies(name, task) for task in battery.tasks}
        longest = max(row.values(), key=lambda one: int(one.facts[CONTEXT]))
        cache = "no cache" if longest.cache is None else f"{longest.cache:,}"
        params = max(one.params for one in row.values())
        label = name + " *" * any(not one.is_shipped for one in row.values())
        shown = {task: describe_accuracies(own) for task, own in found.items()}
        for task in (one for one in row if battery.tasks[one].metric != ACCURACY):
            before = fmean(battery.list_accuracies(name, task, trained=True))
            shown[task] = f"{100 * before:.0f} → {shown[task]}"
        cells.append([label, *shown.values(), cache, f"{params:,}"])
        few = [f"{task} ({len(own)} of {SEEDS})" for task, own in found.items() if len(own) < SEEDS]
        lacks += [f"{name} lacks seeds: {', '.join(few)}"] * bool(few)
    lengths = ", ".join(f"{name} {task.length}" for name, task in battery.tasks.items())
    notes = [
        "each task: accuracy in %, ± its standard deviation over seeds, and how many seeds solve "
        f"it ({SOLVED:.0%}); tokens in a row: {lengths}; before an arrow: at the trained length",
        "order: by the share of seeds that solve a task, then by accuracy, both averaged over "
        "tasks; missing seeds count as 0",
        "cache: bytes of cache or state in half precision, after the longest rows in training; "
        "params: of the largest of its models; *: trained here (all others are shipped)",
        *lacks,
        *(f"left out: {', '.join(own)}: {why}" for why, own in battery.left_out.items()),
    ]
    return Table("The battery", cells, notes=notes)


def describe_accuracies(values: Sequence[float]) -> str:
    """Return `99.5±1 2/3`: the mean in %, the standard deviation, and how many reach SOLVED."""
    if not values:
        return MISSING
    spread = f"±{100 * stdev(values):.0f}" if len(values) > 1 else ""
    return f"{100 * fmean(values):.1f}{spread} {sum(x >= SOLVED for x in values)}/{len(values)}"
