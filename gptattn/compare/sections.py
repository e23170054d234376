"""Splits runs into the sections of the report: one model size, budget and text per section.

Within a section the runs may differ in what is compared: attention, position, and the block, unless
each block has several variants: then the question is what holds in each, and each is a section. So
it is with optimizers and precisions. A variant may also have its own MLP width, chosen by `match`,
or its own learning rate. Each tokenizer is a section: a loss per token says nothing of tokens of
another kind.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gptattn.compare.finished_runs import Run
from gptattn.compare.setting_words import counted, width_before
from gptattn.errors import ConfigError

SIZES = ("num_layers", "d_model", "context_length", "vocab_size")
MATRICES = "optim.matrices"  # runs from before it was a setting have AdamW
NOT_OF_TASK = ("data._target_", "data.val_rows", "data.vocab_size")  # other axes have them
LONGEST = 20  # longer settings, in characters, are shown as a hash in titles


@dataclass(frozen=True)
class RunSet:
    """Runs that can be compared with each other."""

    title: str  # how it differs from the other sets; "" for the only one
    size: str  # the part of the title on the model's size
    family: str  # the rest of the title: equal for sets that differ only in size
    runs: list[Run]
    parts: Mapping[str, str] = field(default_factory=dict)  # of the title, by axis; "": no part


def _data(run: Run) -> list[str]:
    if (task := run.data.get("task")) is not None:
        return [f"task {task}", f"{run.data.get('val_rows', '?')} validation rows"]
    text = run.data.get("text_sha256", "?")[:8]
    unit = "bytes" if "val_bytes" in run.data else "tokens"  # bytes are those of every tokenizer
    return [f"text {text}", f"{run.data.get(f'val_{unit}', '?')} validation {unit}"]


def _task(run: Run) -> list[str]:
    """Return the settings of a task, and the length of its rows; nothing for a text."""
    if "task" not in run.data:
        return []
    own = sorted(k for k in run.settings if k.startswith("data.") and k not in NOT_OF_TASK)
    length = run.settings.get("model.context_length")
    return [f"context_length={length}", *(f"{k[5:]}={run.settings[k]}" for k in own)]


def _tokenizer(run: Run) -> list[str]:
    # The path is left out: a tokenizer file is identified by its sha256.
    settings = [
        f"{key.removeprefix('tokenizer.')}={_short(value)}"
        for key, value in sorted(run.settings.items(), reverse=True)  # the size before the hash
        if key.startswith("tokenizer.") and key not in ("tokenizer._target_", "tokenizer.path")
    ]
    target = run.settings.get("tokenizer._target_", "").rpartition(".")[2]
    return [" ".join(filter(None, [run.data.get("tokenizer", ""), target])) or "?", *settings]


def _short(value: str) -> str:
    """Return the value, or its hash if it is too long for a title (a character vocabulary)."""
    return value if len(value) <= LONGEST else f"#{hashlib.sha256(value.encode()).hexdigest()[:8]}"


def _validation(run: Run) -> list[str]:
    return [f"{k}={v}" for k, v in sorted(run.settings.items()) if k.startswith("validation.")]


def _model(run: Run) -> list[str]:
    found = [f"{key}={run.settings.get(f'model.{key}')}" for key in SIZES]
    return [*found, f"d_mlp={width_before(run)}"]


def _budget(run: Run) -> list[str]:
    return [re.sub(r"(?<![\d.])\d{4,}", lambda digits: f"{int(digits[0]):,}", run.budget or "?")]


def _setting(key: str) -> Callable[[Run], list[str]]:
    return lambda run: [f"{key}={run.settings.get(key)}"]


def _block(run: Run) -> list[str]:
    keys = sorted(k for k in run.settings if k.startswith("block.") or k == "model.mlp")
    return [f"{key}={run.settings[key]}" for key in keys]


def _optimizer(run: Run) -> list[str]:
    """Return the rule for the layers' matrices; its rate and schedule are a variant's own."""
    keys = [key for key in sorted(run.settings) if key.startswith(f"{MATRICES}.")]
    if not keys:
        return ["AdamW"]
    rule = run.settings.get(f"{MATRICES}._target_", "?").rpartition(".")[2]
    return [rule, *(f"{key}={run.settings[key]}" for key in keys if not key.endswith("_target_"))]


def _weights(run: Run) -> list[str]:
    return ["from other weights" if run.origin else "from scratch"]


# Losses can only be compared between runs that agree in these.
MUST_AGREE: dict[str, Callable[[Run], list[str]]] = {
    "data": _data,
    "tokenizer": _tokenizer,
    "validation": _validation,
}
AXES: dict[str, Callable[[Run], list[str]]] = {
    **MUST_AGREE,
    "task": _task,
    "model": _model,
    "budget": _budget,
    "batch_size": _setting("batch_size"),
    "precision": _setting("trainer.precision"),
    "device": _setting("device"),
    "weights": _weights,
    "block": _block,
    "optim": _optimizer,
}

# With one variant these are what is compared: rows of a section. See `_apart`.
ROWS_OR_SECTIONS = ("block", "precision", "optim")
# Sections that differ in one of these alone are held against each other.
HELD_AGAINST = (*ROWS_OR_SECTIONS, "tokenizer")


def comparable_sets(runs: Sequence[Run], split: bool) -> list[RunSet]:
    """Split the runs into sets that can be compared, smaller models first.

    Raises ConfigError if `split` is false and the runs differ in text or validation, or in a
    tokenizer whose bits per byte are not of the same bytes.
    """
    refusal = differences(runs)
    if refusal and not split:
        raise ConfigError(
            "comparison",
            f"the runs differ in {refusal}; --split reports each separately, or give fewer folders",
        )
    always = axes_of(runs)
    axes = [axis for axis in AXES if axis in always or _apart(axis, runs)]
    sets = _split(runs, axes)
    firsts = [members[0] for members in sets.values()]
    return [_named(members, firsts, axes) for members in sorted(sets.values(), key=_order)]


def axes_of(runs: Sequence[Run]) -> list[str]:
    """Return the axes on which these runs must agree, even with one variant.

    On a task, models of different sizes can be compared: which of them solve it?
    """
    of_task = all("task" in run.data for run in runs)
    either = (*ROWS_OR_SECTIONS, "model") if of_task else ROWS_OR_SECTIONS
    return [axis for axis in AXES if axis not in either and any(map(AXES[axis], runs))]


def _apart(axis: str, runs: Sequence[Run]) -> bool:
    """Whether each value on the axis has several variants; if not, the values are compared."""
    values = _split(runs, [axis]).values()
    return all(len({run.variant for run in members}) > 1 for members in values)


def _split(runs: Sequence[Run], axes: Iterable[str]) -> dict[tuple[str, ...], list[Run]]:
    """Return words on these axes -> the runs that share them."""
    sets: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        sets.setdefault(tuple(words_of(axis, run) for axis in axes), []).append(run)
    return sets


def _named(members: list[Run], firsts: Sequence[Run], axes: Iterable[str]) -> RunSet:
    parts = {axis: difference_on_axis(axis, members[0], firsts) for axis in axes}
    origins = {run.settings.get("init_from", "") for run in members}
    if parts.get("weights") and members[0].origin and len(origins) == 1:
        parts["weights"] = f"from {origins.pop()}"
    others = [part for axis, part in parts.items() if part and axis != "model"]
    title = ", ".join(filter(None, parts.values()))
    return RunSet(title, parts.get("model", ""), ", ".join(others), members, parts)


def words_of(axis: str, run: Run) -> str:
    """Return the run's value on one of AXES, in words; equal words mean comparable runs."""
    return ", ".join(AXES[axis](run)) or "?"


def differences(runs: Sequence[Run]) -> str:
    """Return what forbids a comparison: `data (text 1a2b3c4d: 2 runs; ...)`; "" if nothing does."""
    found = []
    by_bytes = all("val_bytes" in run.data for run in runs)  # if equal, bits per byte are compared
    for axis in MUST_AGREE:
        if axis == "tokenizer" and by_bytes:
            continue
        values = [words_of(axis, run) for run in runs]
        if len(set(values)) > 1:
            found.append(f"{axis} ({counted(values)})")
    return " and ".join(found)


def difference_on_axis(axis: str, run: Run, runs: Sequence[Run]) -> str:
    """Return how the run differs from the others on this axis; "" if all are alike.

    The config file (`model=nano`) if its name explains the whole difference, otherwise the values.
    """
    values = {words_of(axis, other) for other in runs}
    if len(values) == 1:
        return ""
    picked = {(other.choices.get(axis, ""), words_of(axis, other)) for other in runs}
    choices = {choice for choice, _ in picked}
    if len(picked) == len(values) == len(choices) and "" not in choices:
        return f"{axis}={run.choices[axis]}"
    named = axis == "tokenizer" and len(choices) > 1 and "" not in choices
    # With the file's name, only what differs between runs of the same file has to be told.
    alike = [other for other in runs if other.choices[axis] == run.choices[axis]] if named else runs
    common = set.intersection(*(set(AXES[axis](other)) for other in alike))
    own = [part for part in AXES[axis](run) if part not in common]
    return " ".join([*([f"{axis}={run.choices[axis]}"] if named else []), *own])


def _order(runs: Sequence[Run]) -> list[object]:
    """Sort key: by text, then by parameters, then by the words, with 200 before 1,000."""
    params = min(run.metrics.get("cost/params", 0.0) for run in runs)
    words = {axis: words_of(axis, runs[0]) for axis in AXES}
    text = [words.pop(axis) for axis in ("data", "validation")]
    rest = " ".join(words.values()).replace(",", "")
    return [text, params, *(int(w) if w.isdecimal() else w for w in re.split(r"(\d+)", rest))]
