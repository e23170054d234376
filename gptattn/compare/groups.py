"""Splits runs into sections that are compared, and these into rows, and names the rows.

A section has one model size, budget and text. Its runs may differ in what is compared: attention,
position, and the block, unless each block has several variants: then the question is what holds in
each, and each is a section. The same holds for optimizers and precisions. A variant may also have
its own MLP width, chosen by `match`, or its own learning rate. Each tokenizer is a section: losses
per token cannot be compared between tokenizers.

A row is runs that differ only in the seed. It is named by its variant and by what tells it from
other rows of that variant: a config file where that explains it, otherwise the settings.
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from pandas import DataFrame

from gptattn.compare.differences import (
    RATE,
    UNSET,
    count_shared,
    count_values,
    tell_apart,
    width_before,
)
from gptattn.compare.finished_runs import Run
from gptattn.errors import ConfigError

Groups = dict[str, list[Run]]

SIZES = ("num_layers", "d_model", "context_length", "vocab_size")
MATRICES = "optim.matrices"  # their rule; without one they use AdamW, like everything else
NOT_OF_TASK = ("data._target_", "data.val_rows", "data.vocab_size")  # other axes have them
LONGEST = 20  # longer settings, in characters, are shown as a hash in titles


class RunSet(NamedTuple):
    """Runs that can be compared with each other."""

    parts: Mapping[str, str]  # how it differs from the other sets, by axis; "": it does not
    runs: list[Run]


def _data(run: Run) -> list[str]:
    if (task := run.data.get("task")) is not None:
        return [f"task {task}", f"{run.data.get('val_rows', '?')} validation rows"]
    text = run.data.get("text_sha256", "?")[:8]
    unit = "bytes" if "val_bytes" in run.data else "tokens"  # equal for all tokenizers
    return [f"text {text}", f"{run.data.get(f'val_{unit}', '?')} validation {unit}"]


def _task(run: Run) -> list[str]:
    """Return the settings of a task and its row length; nothing for a text."""
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

# With one variant, these are compared, as rows of a section. See `_has_several_variants`.
ROWS_OR_SECTIONS = ("block", "precision", "optim")
# Sections that differ in only one of these are compared with each other.
HELD_AGAINST = (*ROWS_OR_SECTIONS, "tokenizer")


def comparable_sets(runs: Sequence[Run], split: bool) -> list[RunSet]:
    """Split the runs into sets that can be compared, smaller models first.

    Raises ConfigError if `split` is false and the runs differ in text or validation, or in a
    tokenizer whose bits per byte are not of the same bytes.
    """
    refusal = describe_conflict(runs)
    if refusal and not split:
        raise ConfigError(
            "comparison",
            f"the runs differ in {refusal}; --split reports each separately, or give fewer folders",
        )
    words = DataFrame({axis: [words_of(axis, run) for run in runs] for axis in AXES})
    words["variant"] = [run.variant for run in runs]
    always = axes_of(runs)
    axes = [axis for axis in AXES if axis in always or _has_several_variants(words, axis)]
    sets = [[runs[i] for i in part.index] for _, part in words.groupby(axes, sort=False)]
    firsts = [members[0] for members in sets]
    return [_named(members, firsts, axes) for members in sorted(sets, key=_order)]


def axes_of(runs: Sequence[Run]) -> list[str]:
    """Return the axes on which these runs must agree, even with one variant.

    On a task, models of different sizes can be compared: which of them solve it?
    """
    of_task = all("task" in run.data for run in runs)
    either = (*ROWS_OR_SECTIONS, "model") if of_task else ROWS_OR_SECTIONS
    return [axis for axis in AXES if axis not in either and any(map(AXES[axis], runs))]


def _has_several_variants(words: DataFrame, axis: str) -> bool:
    """Whether each value on the axis has several variants; if not, the values are compared."""
    return bool((words.groupby(axis)["variant"].nunique() > 1).all())


def _named(members: list[Run], firsts: Sequence[Run], axes: Sequence[str]) -> RunSet:
    parts = {axis: difference_on_axis(axis, members[0], firsts) for axis in axes}
    origins = {run.settings.get("init_from", "") for run in members}
    if parts.get("weights") and members[0].origin and len(origins) == 1:
        parts["weights"] = f"from {origins.pop()}"
    return RunSet(parts, members)


def words_of(axis: str, run: Run) -> str:
    """Return the run's value on one of AXES, in words; equal words mean comparable runs."""
    return ", ".join(AXES[axis](run)) or "?"


def describe_conflict(runs: Sequence[Run]) -> str:
    """Return what forbids a comparison: `data (text 1a2b3c4d: 2 runs; ...)`; "" if nothing does."""
    found = []
    by_bytes = all("val_bytes" in run.data for run in runs)  # if equal, bits per byte are compared
    for axis in MUST_AGREE:
        if axis == "tokenizer" and by_bytes:
            continue
        values = [words_of(axis, run) for run in runs]
        if len(set(values)) > 1:
            found.append(f"{axis} ({count_values(values)})")
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
    # Beside the file's name, only differences between runs of the same file need naming.
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


def group_runs(runs: Sequence[Run]) -> Groups:
    """Group runs that have the same variant, settings and code, under the shortest unique names.

    The name is the variant; beside runs from scratch, `gqa from outputs/mha` for other weights. If
    several groups share it, their differences follow: the config file (`model=nano`) where that
    explains them, otherwise the settings; of attention, parts and position the file and what
    differs between runs of the same file. Where they are many, and all but one group have changed
    something in that one, as in an ablation, a name has what was changed. Learning rates are left
    out where each group has its own. Each group holds one run per seed, sorted by seed: the newest,
    as a repeat is no further sample.
    """
    runs = sorted(runs, key=lambda run: run.finished)
    made = DataFrame([_made_of(run) for run in runs])
    differ = list(made.columns[made.nunique(dropna=False) > 1])
    sets = made.groupby(differ, dropna=False, sort=False) if differ else [("", made)]
    groups = [[runs[i] for i in part.index] for _, part in sets]
    firsts = [members[0] for members in groups]
    mixed = not all(run.origin for run in runs)

    def name_of(run: Run) -> str:
        start = f" from {run.settings['init_from']}" if mixed and run.origin else ""
        return run.variant + start

    rivals: dict[str, list[Run]] = {}
    for first in firsts:
        rivals.setdefault(name_of(first), []).append(first)
    hidden = {RATE} if _own_rates(firsts) else set[str]()
    # In the order of the groups.
    words = {own: iter(tell_apart(alike, hidden)) for own, alike in rivals.items()}
    named: Groups = {}
    for members in groups:
        own = name_of(members[0])
        name = _unique_name(" ".join([own, *next(words[own])]), named)
        named[name] = sorted({run.seed: run for run in members}.values(), key=lambda run: run.seed)
    return named


def _made_of(run: Run) -> dict[str, str]:
    """Return everything that runs of one row have in common."""
    text = run.data.get("text_sha256", "")
    return {**run.settings, "variant": run.variant, "code": run.code, "text_sha256": text}


def name_copies(runs: Sequence[Run], groups: Groups) -> list[str]:
    """Return a line for each run that its group drops for a newer one with the same seed."""

    def key(run: Run) -> tuple[object, ...]:
        return run.seed, *sorted(_made_of(run).items())

    counts = {key(run): run for members in groups.values() for run in members}
    return [
        f"{run.folder}: a copy of {counts[key(run)].folder.name}, which counts"
        for run in runs
        if run.folder != counts[key(run)].folder
    ]


def rates_differ(groups: Groups) -> bool:
    """Whether the groups differ in learning rate, each having a single one."""
    return _own_rates([members[0] for members in groups.values()])


def _own_rates(firsts: Sequence[Run]) -> bool:
    """Whether learning rates vary, but no two groups differ in them alone."""
    rates: dict[tuple[object, ...], set[str]] = {}
    for run in firsts:
        others = sorted((key, value) for key, value in run.settings.items() if key != RATE)
        rates.setdefault((run.variant, run.code, *others), set()).add(run.settings.get(RATE, UNSET))
    return len(set().union(*rates.values())) > 1 and all(len(own) == 1 for own in rates.values())


def _unique_name(name: str, taken: Groups) -> str:
    """Return the name, numbered if taken: truncated values can make two names equal."""
    count = 2
    unique = name
    while unique in taken:
        unique, count = f"{name} ({count})", count + 1
    return unique


def pick_baseline(groups: Groups, name: str | None) -> str | None:
    """Return the row called `name`, or the only row of the variant `name`; None without one.

    Without a name, return the row, of `mha` if there is one, whose settings most often equal those
    of the other rows, so that changed rows are compared with an unchanged one; learning rates that
    each row has for itself do not count. On a tie, take the one with the fewest words in its name,
    then the first in name order.
    """
    if name is None:
        mha = [row for row, members in groups.items() if members[0].variant == "mha"]
        firsts = [members[0] for members in groups.values()]
        keys = {key for run in firsts for key in run.settings}
        keys -= {RATE} if rates_differ(groups) else set()
        shared = dict(zip(groups, count_shared(firsts, keys), strict=True))
        return min(mha or groups, key=lambda row: (-shared[row], len(row.split()), row))
    if name in groups:
        return name
    rows = [row for row, members in groups.items() if members[0].variant == name]
    return rows[0] if len(rows) == 1 else None
