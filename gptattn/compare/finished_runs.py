"""Reads finished runs. Whatever is half-written or damaged is named and passed over."""

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any

import msgspec

from gptattn import command
from gptattn.errors import DataError
from gptattn.runs.folder import CONFIG, RunFolder
from gptattn.settings.identity import Making, flat, places, result_settings

# The end of a run folder's name: runs of several seeds that start each from its own seed's weights
# differ in nothing else.
SEED_AND_ID = re.compile(r"_s\d+((,.*)?)_[0-9a-f]{6}$")
LARGEST = 1e30  # of any figure: beyond, sums and squares of it are infinite
DAMAGE = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    OverflowError,
    msgspec.MsgspecError,
)


class Match(msgspec.Struct, frozen=True):
    """What `match` did to a run's model: `field` went from `before` to `after`."""

    what: str
    to: str
    field: str
    before: float | None
    after: float | None
    target: float
    reached: float


class Completed(msgspec.Struct, frozen=True):
    """What a run had come to at the end of a budget."""

    budget: dict[str, int | float | None]  # as the settings had it: steps, tokens, ...
    step: int
    metrics: dict[str, float | None]


@dataclass(frozen=True)
class Run:
    """One finished run: its summary.json, and what of config.yaml its result depends on."""

    folder: Path
    variant: str
    seed: int
    metrics: dict[str, float]  # finite values only; val/loss is always there
    settings: dict[str, str]  # all that a result can depend on but the seed, flat
    budget: str = ""  # as "1000 steps"
    data: dict[str, str] = field(default_factory=dict)  # of summary.json
    environment: dict[str, str] = field(default_factory=dict)  # flat
    match: Match | None = None
    finished: float = 0.0  # seconds since 1970
    choices: dict[str, str] = field(default_factory=dict)  # the files picked, as model: nano
    origin: str = ""  # the name of the folder whose weights it started from; "": from scratch
    steps: int = 0  # of training, its own
    completed: Sequence[Completed] | None = None  # by step, this budget too; None: not recorded
    until: float = math.inf  # the step that its curves are shown up to
    making: Making | None = None  # what made it, beside its settings; None: unknown
    places: dict[str, str] = field(default_factory=dict)  # settings that say where something lies

    @property
    def code(self) -> str:
        return self.making.digest if self.making else "unknown"


class _Summary(msgspec.Struct):
    variant: str
    seed: int
    metrics: dict[str, float | None]
    data: dict[str, Any]
    hyperparameters: dict[str, Any]
    status: str = "done"
    environment: dict[str, Any] = {}
    match: Any = None
    steps: int = 0
    completed: list[Completed] | None = None


def read_runs(paths: Iterable[str | Path]) -> tuple[list[Run], list[str]]:
    """All finished runs at or below the paths, each once, and a line for each folder passed over.

    Raises DataError where a path does not exist or no finished run is found.
    """
    runs: list[Run] = []
    passed_over: list[str] = []
    seen: set[tuple[int, int]] = set()
    for path in map(Path, paths):
        if not path.is_dir():
            raise DataError("run folder", f"{path} is no folder; give a run or sweep folder")
        for folder in _run_folders(path, seen, passed_over):
            try:
                runs.append(_read(RunFolder(folder)))
            except DAMAGE as error:
                passed_over.append(one_line(f"{folder}: {_reason(error, folder)}"))
    if not runs:
        passed = f" ({len(passed_over)} passed over, as {passed_over[0]})" if passed_over else ""
        raise DataError(
            "run folder", f"no finished run there{passed}; train one first: {command('train')}"
        )
    return _told_apart(runs), passed_over


def one_line(text: str) -> str:
    """Text from a file or a file's name, made fit for one line of a terminal."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text)[:400]


def _reason(error: Exception, folder: Path) -> str:
    if isinstance(error, FileNotFoundError) and RunFolder(folder).weights_file.is_file():
        return "weights that were converted, and not trained: nothing to compare"
    if isinstance(error, FileNotFoundError):
        return "not finished"
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return f"{error}" if isinstance(error, ValueError | msgspec.MsgspecError) else repr(error)


def _run_folders(path: Path, seen: set[tuple[int, int]], passed_over: list[str]) -> Iterator[Path]:
    """A run's folder is known by the config.yaml that claims it; Hydra's copy is not one.

    Links are followed, and `seen` holds each folder's identity: a loop of them has an end.
    """
    waiting = [path]
    while waiting:
        folder = waiting.pop()
        try:
            info = folder.stat()
            if (info.st_dev, info.st_ino) in seen:
                continue
            seen.add((info.st_dev, info.st_ino))
            names = sorted((entry.name for entry in os.scandir(folder)), reverse=True)
            # Path.is_dir, as that of an entry raises for a link to itself.
            below = [folder / n for n in names if n[0] != "." and (folder / n).is_dir()]
        except OSError as error:
            passed_over.append(one_line(f"{folder}: {_reason(error, folder)}"))
            continue
        if CONFIG in names:
            yield folder
        waiting.extend(below)


def _read(folder: RunFolder) -> Run:
    summary = msgspec.convert(folder.read_summary(), _Summary)
    if summary.status != "done":
        raise ValueError(f"not finished: its status is {summary.status!r}")
    metrics = finite(summary.metrics)
    if "val/loss" not in metrics:
        raise ValueError("summary.json has no finite val/loss")
    config = flat(folder.read_settings())
    settings = result_settings(config)
    origin = config.get("init_from", "None")
    origin = "" if origin == "None" else origin
    if origin:
        settings["init_from"] = seedless(origin)
    settings["text"] = str(summary.data["text_sha256"])[:8]
    settings["device"] = str(summary.hyperparameters["device"])
    return Run(
        folder.path,
        one_line(summary.variant),
        summary.seed,
        metrics,
        _shown(settings),
        one_line(settings["budget"]),
        _shown(flat(summary.data)),
        _shown(flat(summary.environment)),
        _match(summary.match),
        folder.done_at,
        {k[8:]: one_line(v) for k, v in config.items() if k.startswith("choices.")},
        one_line(PurePath(origin).name),
        summary.steps,
        summary.completed,
        making=folder.read_making(),
        places=_shown(places(config)),
    )


def finite(metrics: Mapping[str, float | None]) -> dict[str, float]:
    # NaN is not below anything either.
    return {k: v for k, v in metrics.items() if v is not None and abs(v) < LARGEST}


def _told_apart(runs: Sequence[Run]) -> list[Run]:
    """The runs, those that start from equal weights under one name for them, others under several.

    The path is the name. It stands for one file's content, except where it is that of a run with a
    seed: then it is a different one for each seed, and the name is what they have in common.
    """
    names: dict[str | None, str] = {}
    contents: dict[str, set[str | None]] = {}
    for run in runs:
        if run.origin and not SEED_AND_ID.search(run.origin):
            weights = run.making and run.making.weights
            names.setdefault(weights, run.settings["init_from"])
            contents.setdefault(run.settings["init_from"], set()).add(weights)
    told = []
    for run in runs:
        weights = run.making and run.making.weights
        if run.origin and not SEED_AND_ID.search(run.origin):
            name = names[weights] if weights else run.settings["init_from"]
            name += f" {(weights or 'unknown')[:8]}" if len(contents[name]) > 1 else ""
            run = replace(run, settings=run.settings | {"init_from": name})
        told.append(run)
    return told


def seedless(path: str) -> str:
    """The path of a run's folder without its seed and id."""
    return SEED_AND_ID.sub(r"\1", path)


def _shown(values: Mapping[str, str]) -> dict[str, str]:
    return {one_line(key): one_line(value) for key, value in values.items()}


def _match(node: Any) -> Match | None:
    try:
        match = None if node is None else msgspec.convert(node, Match)
    except (msgspec.ValidationError, OverflowError):
        return None  # a record of another version: no reason to drop the run
    if match is None:
        return None
    figures = (match.before, match.after, match.target, match.reached)
    if not all(abs(x) < LARGEST for x in figures if x is not None):
        return None
    return msgspec.structs.replace(
        match, what=one_line(match.what), to=one_line(match.to), field=one_line(match.field)
    )
