"""Reads finished runs, and skips others with a line that says why."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from gptattn import command
from gptattn.errors import DAMAGE, DataError
from gptattn.machine.disk import expand_path, read_json, walk_once
from gptattn.machine.source_code import is_unchanged
from gptattn.runs.evaluation import Evaluation
from gptattn.runs.folder import CONFIG, TUNING, RunFolder
from gptattn.runs.metrics import CACHE, FLOPS, LOSS
from gptattn.runs.speeds import Measurement, find_measured
from gptattn.runs.two_stages import NAME, FirstStage, TwoStages, variant_key
from gptattn.settings.config import CONF, default_width
from gptattn.settings.identity import Provenance, differences, flat, result_settings, typed_paths
from gptattn.settings.own_code import use_recorded
from gptattn.settings.record import complete_record

# The seed and id at the end of a run folder's name. If each seed starts from the weights of the run
# with the same seed, the values of `init_from` differ only here.
SEED_AND_ID = re.compile(r"_s\d+([+,].*|)_[0-9a-f]{6}$")
# Keys of Run.settings that Run.provenance also records.
OF_PROVENANCE = ("text", "device", "init_from")
# Shipped results of the attention track, its gate and the battery, by the folder of their runs.
SHIPPED = {n: CONF.parent / "benchmarks" / n for n in ("track", "track_gate", "battery")}
LARGEST = 1e30  # drop larger figures: their squares and sums could overflow


class Match(msgspec.Struct, frozen=True):
    """What `match` did to a run's model: it changed `field` from `before` to `after`."""

    cost: str = msgspec.field(name="what")  # the matched cost: params or flops
    field: str  # the setting that was changed, as model.d_mlp
    before: float | None
    after: float | None


@dataclass(frozen=True)
class Run:
    """One finished run: its summary.json and the settings that its result depends on."""

    folder: Path
    variant: str
    seed: int
    metrics: dict[str, float]  # finite values only; val/loss is always there
    # Flat; everything that can change the result, except the seed. `budget` is text, "1000 steps"
    # or "1000 steps, then 2000 steps". `init_from` is only there for runs from other weights.
    settings: dict[str, str]
    data: dict[str, str] = field(default_factory=dict)  # `data` of summary.json, flat
    environment: dict[str, str] = field(default_factory=dict)  # flat
    match: Match | None = None
    finished: float = 0.0  # seconds since 1970
    choices: dict[str, str] = field(default_factory=dict)  # config files, as {"model": "nano"}
    hyperparameters: dict[str, Any] = field(default_factory=dict)  # as TensorBoard shows them
    steps: int = 0  # training steps, without those of the run in `init_from`
    provenance: Provenance | None = None  # code, text, weights and device; None: not recorded
    places: dict[str, str] = field(default_factory=dict)  # settings that hold paths
    stage: FirstStage | None = None  # of its sweep, if that used `sweep.until`
    evaluation: Evaluation | None = None  # by gptattn-evaluate, on any of its weights
    uncached: bool = False  # the mechanism has no cache, so decoding rereads the prefix
    checked: bool = True  # whether the model was checked to be causal
    overrides: Sequence[str] = ()  # as typed; empty for a run started in Python
    max_seeds: int = 1_000  # `sweep.max_seeds`
    name: str | None = None  # of its row, if the user gave one
    shared: bool = False  # whether other runs shared its machine
    speeds: Sequence[Measurement] = ()  # measurements of its variant, the newest last

    @property
    def code(self) -> str:
        """Eight characters that identify the run's code, or `unknown`."""
        return self.provenance.digest if self.provenance else "unknown"

    @property
    def mlp_width(self) -> str:
        """The MLP's width before `match` changed it; `default` if none was set."""
        width = self.settings.get("model.d_mlp", "None")
        if self.match is not None and self.match.field == "model.d_mlp":
            width = f"{self.match.before:g}" if self.match.before else "None"
        d_model = self.settings.get("model.d_model", "")
        mlp = "swiglu" if self.settings.get("model.mlp") == "swiglu" else "gelu"
        default = str(default_width(mlp, int(d_model))) if d_model.isdecimal() else "None"
        return "default" if width in ("None", default) else width


class _Summary(msgspec.Struct):
    variant: str
    seed: int
    metrics: dict[str, float | None]
    data: dict[str, Any]
    hyperparameters: dict[str, Any]
    status: str = "done"
    environment: dict[str, Any] = {}
    match: Match | None = None
    steps: int = 0
    shares: str | None = None


def read_runs(paths: Iterable[str | Path]) -> tuple[list[Run], list[str]]:
    """Return all finished runs at or below the paths, and a line per skipped folder.

    A run that several paths reach is returned once. Trials of learning rates are skipped unless a
    path names their folder. Raises DataError if a path is not a folder or no finished run is found.
    """
    runs: list[Run] = []
    skipped: list[str] = []
    seen: set[str] = set()
    for path in (expand_path(path, "run folder") for path in paths):
        if not path.is_dir():
            raise DataError("run folder", f"{path} is not a folder; give a run or sweep folder")
        for folder in _run_folders(path, seen, skipped):
            try:
                run = _read(folder)
            except DAMAGE as error:
                skipped.append(one_line(f"{folder}: {_reason(error, folder)}"))
                continue
            try:
                found = RunFolder(folder).read_evaluation()
                tasks = found.tasks.items() if found and found.step == run.steps else []
                scores = {f"lm_eval/{n}/{key}": x for n, t in tasks for key, x in t.values.items()}
                run = replace(run, evaluation=found, metrics=run.metrics | finite(scores))
            except DAMAGE as error:
                skipped.append(one_line(f"{folder}: its evaluation: {_reason(error, folder)}"))
            runs.append(run)
    if not runs:
        some = f" ({len(skipped)} skipped, such as {skipped[0]})" if skipped else ""
        raise DataError("run folder", f"no finished run found{some}; train one: {command('train')}")
    return runs, skipped


def find_experiment(runs: Sequence[Run]) -> str | None:
    """Return which of SHIPPED these runs belong to, or None."""
    homes = {run.folder.absolute().parent.name for run in runs}
    return homes.pop() if len(homes) == 1 and homes <= SHIPPED.keys() else None


def one_line(text: str) -> str:
    """Make untrusted text safe to print on one line: printable, at most 400 characters."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text)[:400]


def _reason(error: Exception, folder: Path) -> str:
    if isinstance(error, FileNotFoundError) and RunFolder(folder).weights_file.is_file():
        return "converted weights without training; nothing to compare"
    if isinstance(error, FileNotFoundError):
        failure = RunFolder(folder).read_failure()
        return "not finished" if failure is None else f"failed: {failure.get('error')}"
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return f"{error}" if isinstance(error, ValueError) else repr(error)


def _run_folders(path: Path, seen: set[str], skipped: list[str]) -> Iterator[Path]:
    """Yield the folders that hold a config.yaml, except hidden ones such as Hydra's `.hydra`.

    It follows links. `seen` holds each folder's real path, so that a loop of links ends.
    """

    def skip(error: OSError) -> None:
        skipped.append(one_line(f"{error.filename}: {error.strerror}"))

    for folder, below, files in walk_once(path, seen, skip):
        if CONFIG in files:
            yield folder
        elif TUNING in below:
            below.remove(TUNING)
            line = "trials of learning rates; name this folder to compare them"
            skipped.append(one_line(f"{folder / TUNING}: {line}"))


def _read(path: Path) -> Run:
    folder = RunFolder(path)
    summary = msgspec.convert(folder.read_summary(), _Summary)
    if summary.status != "done":
        raise ValueError(f"not finished: its status is {summary.status!r}")
    if folder.replaced:
        raise ValueError("replaced: its variant now has a better learning rate")
    metrics = finite(summary.metrics)
    if LOSS not in metrics:
        raise ValueError(f"summary.json has no finite {LOSS}")
    recorded, stages = folder.read_record(), read_json(path.parent / NAME, TwoStages)
    # The stages were recorded before newer settings existed.
    stage = stages.of(recorded) if stages else None
    key, provenance = variant_key(recorded), folder.read_provenance()
    complete_record(recorded)
    use_recorded(recorded)  # changes of its code are checked later
    config, data = _flat(recorded), _flat(summary.data)
    settings = result_settings(config)
    if provenance is not None and provenance.budgets:
        settings["budget"] = one_line(", then ".join([*provenance.budgets, settings["budget"]]))
    origin = config.get("init_from", "None")
    if origin != "None":
        settings["init_from"] = seedless(origin)
        if seedless(origin) == origin and provenance is not None and provenance.weights:
            settings["init_from"] += f" {provenance.weights[:8]}"  # the path can change its weights
    if "task" not in data:  # a task's settings determine its data
        settings["text"] = data["text_sha256"][:8]
    settings["device"] = one_line(str(summary.hyperparameters["device"]))
    sizes = (settings.get(name, "0") for name in ("batch_size", "model.context_length"))
    costs = math.prod(map(int, sizes)), metrics.get(FLOPS, 0.0)
    speeds = find_measured(path.parent, key, provenance.digest, *costs) if provenance else []
    metrics |= speeds[-1].metrics if speeds else {}
    return Run(
        path,
        one_line(summary.variant),
        summary.seed,
        metrics,
        settings,
        data=data,
        environment=_flat(summary.environment),
        match=summary.match,
        finished=folder.summary_file.stat().st_mtime,
        choices=_flat(recorded.get("choices", {})),
        hyperparameters=summary.hyperparameters,
        steps=summary.steps,
        provenance=provenance,
        places=typed_paths(config),
        stage=stage,
        uncached=summary.metrics.get(CACHE, 0) is None,
        checked=config.get("checks") != "False",
        overrides=[one_line(str(override)) for override in recorded.get("overrides") or ()],
        max_seeds=int(config.get("sweep.max_seeds", Run.max_seeds)),
        name=one_line(str(recorded["name"])) if recorded.get("name") else None,
        shared=summary.shares is not None,
        speeds=speeds,
    )


def _flat(node: Mapping[str, Any]) -> dict[str, str]:
    return {one_line(key): one_line(value) for key, value in flat(dict(node)).items()}


def finite(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Return the metrics with a finite value below LARGEST in size."""
    # NaN < LARGEST is false, so this also drops NaN.
    return {k: v for k, v in metrics.items() if v is not None and abs(v) < LARGEST}


def seedless(path: str) -> str:
    """Return the path of a run folder without its seed and id."""
    return SEED_AND_ID.sub(r"\1", path)


def without_replaced(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """Return the runs that count, and a line for each run that another one replaces.

    A run replaces another in the same sweep folder if it has the same settings and seed but
    different code, text, device or starting weights. Runs of the current code take precedence,
    since an edit can be undone, then the newest. A run with the same provenance as the one that
    counts is kept.
    """

    def command(run: Run) -> tuple[object, ...]:
        settings = {k: v for k, v in run.settings.items() if k not in OF_PROVENANCE} | run.places
        # Drop the seed and id: the run that gave the starting weights may be replaced itself.
        settings["init_from"] = seedless(run.places.get("init_from", ""))
        return run.folder.parent, run.variant, run.seed, *sorted(settings.items())

    def rank(run: Run) -> tuple[bool, float]:
        recorded = run.provenance
        current = recorded is not None and not recorded.earlier and is_unchanged(recorded.code)
        return current, run.finished

    chosen = {command(run): run for run in sorted(runs, key=rank)}  # of equal keys, the last stays
    kept, lines = [], []
    for run in runs:
        other = chosen[command(run)]
        why = differences(run.provenance, other.provenance) if other.provenance else []
        if why:
            lines.append(f"{run.folder}: replaced by {other.folder.name} ({', '.join(why)})")
        else:
            kept.append(run)
    return kept, lines
