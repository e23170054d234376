"""Reads finished runs. Whatever is half-written or damaged is named and passed over."""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import msgspec
import yaml

from gptattn.errors import DataError
from gptattn.untrusted import CONFIG_BYTES, SUMMARY_BYTES, read_bytes, read_yaml

# Settings that no result depends on: runs that differ in them alone differ in nothing. The budget
# is not among them: it is kept as one setting, in words.
NO_MATTER = re.compile(
    r"(seed|experiment_name|log_every|hang_seconds|checkpoint|cache_dir|allow_targets(\[.*)?|data\.path"
    r"|choices\..*|trainer\.(accelerator|threads)|match_(attn|before).*|sample\..*|sweep\..*|validation\.count|budget\..*)$"
)
# The end of a run folder's name: runs of several seeds that start each from its own seed's weights
# differ in nothing else.
SEED_AND_ID = re.compile(r"_s\d+_[0-9a-f]{6}$")
LARGEST = 1e30  # of any figure: beyond, sums and squares of it are infinite
NODES, DEPTH = 5_000, 20  # a few bytes of YAML with aliases can stand for any number of values
DAMAGE = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
    msgspec.MsgspecError,
    yaml.YAMLError,
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


def read_runs(paths: Iterable[Path]) -> tuple[list[Run], list[str]]:
    """All finished runs at or below the paths, each once, and a line for each folder passed over.

    Raises DataError where a path does not exist or no finished run is found.
    """
    runs: list[Run] = []
    passed_over: list[str] = []
    seen: set[tuple[int, int]] = set()
    for path in paths:
        if not path.is_dir():
            raise DataError("run folder", f"{path} is no folder; give a run or sweep folder")
        for folder in _run_folders(path, seen, passed_over):
            try:
                runs.append(_read(folder))
            except DAMAGE as error:
                passed_over.append(one_line(f"{folder}: {_reason(error)}"))
    if not runs:
        passed = f" ({len(passed_over)} passed over, as {passed_over[0]})" if passed_over else ""
        raise DataError(
            "run folder", f"no finished run there{passed}; train one first: python train.py"
        )
    return runs, passed_over


def one_line(text: str) -> str:
    """Text from a file or a file's name, made fit for one line of a terminal."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text)[:400]


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "not finished"
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    if isinstance(error, json.JSONDecodeError):
        return f"summary.json is damaged or half-written: {error}"
    if isinstance(error, yaml.YAMLError):
        return f"config.yaml is damaged: {' '.join(str(error).split())}"
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
            passed_over.append(one_line(f"{folder}: {_reason(error)}"))
            continue
        if "config.yaml" in names:
            yield folder
        waiting.extend(below)


def _flat(node: Any, prefix: str = "") -> dict[str, str]:
    """`{"a.b": "1", "c[0]": "x"}`. Raises ValueError for what is too large or too deep."""
    values: dict[str, str] = {}
    waiting, count = [(prefix, node, 0)], 0
    while waiting:
        name, value, depth = waiting.pop()
        count += 1
        if count > NODES or depth > DEPTH:
            raise ValueError("too many settings, or too deeply nested ones")
        if isinstance(value, dict) and value:
            dot = f"{name}." if name else ""
            waiting.extend((f"{dot}{k}", v, depth + 1) for k, v in value.items())
        elif isinstance(value, list) and value:
            waiting.extend((f"{name}[{i}]", v, depth + 1) for i, v in enumerate(value))
        else:
            values[name] = str(value)
    return values


def budget_words(config: Mapping[str, str]) -> str:
    """`1000 steps`. The default counts only where no other budget is given."""
    given = {k.removeprefix("budget."): v for k, v in config.items() if k.startswith("budget.")}
    default = given.pop("default_steps", None)
    set_ = [f"{value} {unit}" for unit, value in sorted(given.items()) if value != "None"]
    budget = " and ".join(set_) or (f"{default} steps" if default else "")
    # A step is as many tokens as its batch: steps alone are no measure.
    batch = config.get("batch_size")
    return f"{budget} of batch {batch}" if budget.endswith(" steps") and batch else budget


def _read(folder: Path) -> Run:
    text = read_bytes(folder / "summary.json", SUMMARY_BYTES)
    summary = msgspec.convert(json.loads(text.decode("utf-8")), _Summary)
    if summary.status != "done":
        raise ValueError(f"not finished: its status is {summary.status!r}")
    # NaN is not below anything either.
    metrics = {k: v for k, v in summary.metrics.items() if v is not None and abs(v) < LARGEST}
    if "val/loss" not in metrics:
        raise ValueError("summary.json has no finite val/loss")
    node = read_yaml(folder / "config.yaml", CONFIG_BYTES)
    if not isinstance(node, dict):
        raise ValueError("config.yaml holds no settings")
    config = _flat(node)
    settings = {key: value for key, value in config.items() if not NO_MATTER.match(key)}
    settings["budget"] = budget_words(config)
    origin = _origin(config)
    if origin:
        settings["init_from"] = SEED_AND_ID.sub("", origin)
    settings["text"] = str(summary.data["text_sha256"])[:8]
    settings["device"] = str(summary.hyperparameters["device"])
    return Run(
        folder,
        one_line(summary.variant),
        summary.seed,
        metrics,
        _shown(settings),
        one_line(settings["budget"]),
        _shown(_flat(summary.data)),
        _shown(_flat(summary.environment)),
        _match(summary.match),
        (folder / "summary.json").stat().st_mtime,
        {k[8:]: one_line(v) for k, v in config.items() if k.startswith("choices.")},
        one_line(origin),
        summary.steps,
    )


def _origin(config: Mapping[str, str]) -> str:
    path = config.get("init_from", "None")
    return "" if path == "None" else PurePath(path).name


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
