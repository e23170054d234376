"""Splits runs into sections to compare, and sections into rows, and names the rows.

A section has one model size, budget and text. Its runs may differ in what is compared: attention,
position and the block. If every block has several variants, each block is its own section. The same
holds for optimizers and precisions. A variant may also have its own MLP width, chosen by `match`,
or its own learning rate. Each tokenizer is a section: losses per token cannot be compared between
tokenizers.

The runs of a row differ only in the seed. It is named after its variant and the difference to other
rows of that variant: a config file if one explains it, otherwise the settings.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pandas import DataFrame, Series

from gptattn.compare.finished_runs import Run
from gptattn.compare.setting_differences import (
    RATE,
    count_shared,
    tell_apart,
    width_before,
)
from gptattn.runs.metrics import PARAMS

Groups = dict[str, list[Run]]

# With one variant, these are compared, as rows of a section; with several, each is a section.
ROWS_OR_SECTIONS = ("block", "precision", "optim")

SIZES = ("num_layers", "d_model", "context_length", "vocab_size")
MATRICES = "optim.matrices"  # their rule; without one they use AdamW, like everything else
NOT_OF_TASK = ("data._target_", "data.val_rows", "data.vocab_size")  # other axes have them
LONGEST_IN_TITLE = 20  # characters; a longer setting is shown as a hash


class RunSet(NamedTuple):
    """Runs that can be compared with each other."""

    parts: Mapping[str, str]  # how it differs from the other sets, by axis; "": it does not
    runs: list[Run]


def words_by_axis(run: Run) -> dict[str, list[str]]:
    """Return the run's place on each axis, as words such as `d_model=64`.

    Runs of one section have equal words on all axes that make sections.
    """
    settings, data = run.settings, run.data

    def listed(*starts: str) -> list[str]:
        return [f"{k}={v}" for k, v in sorted(settings.items()) if k.startswith(starts)]

    if "task" in data:
        source = [f"task {data['task']}", f"{data.get('val_rows', '?')} validation rows"]
        own = sorted(k for k in settings if k.startswith("data.") and k not in NOT_OF_TASK)
        task = [f"context_length={settings.get('model.context_length')}"]
        task += [f"{key.removeprefix('data.')}={settings[key]}" for key in own]
    else:
        unit = "bytes" if "val_bytes" in data else "tokens"  # bytes are equal for all tokenizers
        source = [f"text {data.get('text_sha256', '?')[:8]}"]
        source += [f"{data.get(f'val_{unit}', '?')} validation {unit}"]
        task = []
    # The rate and schedule are a variant's own.
    rule = settings.get(f"{MATRICES}._target_", "?").rpartition(".")[2]
    optimizer = [word for word in listed(f"{MATRICES}.") if "._target_=" not in word]
    return {
        "data": source,
        "tokenizer": _tokenizer(run),
        "validation": listed("validation."),
        "task": task,
        "model": [
            *(f"{key}={settings.get(f'model.{key}')}" for key in SIZES),
            f"d_mlp={width_before(run)}",
        ],
        "budget": [re.sub(r"(?<![\d.])\d{4,}", lambda n: f"{int(n[0]):,}", run.budget or "?")],
        "batch_size": [f"batch_size={settings.get('batch_size')}"],
        "precision": [f"trainer.precision={settings.get('trainer.precision')}"],
        "device": [f"device={settings.get('device')}"],
        "weights": ["from other weights" if run.origin else "from scratch"],
        "block": listed("block.", "model.mlp"),
        "optim": [rule, *optimizer] if listed(f"{MATRICES}.") else ["AdamW"],
    }


def _tokenizer(run: Run) -> list[str]:
    def short(value: str) -> str:  # a hash, for what is too long for a title: a vocabulary
        digest = hashlib.sha256(value.encode()).hexdigest()[:8]
        return value if len(value) <= LONGEST_IN_TITLE else f"#{digest}"

    # The path is left out: a tokenizer file is identified by its sha256.
    settings = [
        f"{key.removeprefix('tokenizer.')}={short(value)}"
        for key, value in sorted(run.settings.items(), reverse=True)  # the size before the hash
        if key.startswith("tokenizer.") and key not in ("tokenizer._target_", "tokenizer.path")
    ]
    target = run.settings.get("tokenizer._target_", "").rpartition(".")[2]
    return [" ".join(filter(None, [run.data.get("tokenizer", ""), target])) or "?", *settings]


def comparable_sets(runs: Sequence[Run]) -> list[RunSet]:
    """Split the runs into sets that can be compared, smaller models first."""
    words = DataFrame([words_by_axis(run) for run in runs]).map(", ".join)
    words["variant"] = [run.variant for run in runs]
    always = axes_of(runs)
    # Where each value on an axis has several variants, each is a section; if not, they are rows.
    axes = [
        axis
        for axis in words_by_axis(runs[0])
        if axis in always or bool((words.groupby(axis)["variant"].nunique() > 1).all())
    ]
    sets = [[runs[i] for i in part.index] for _, part in words.groupby(axes, sort=False)]
    sets.sort(key=_order)
    firsts = [members[0] for members in sets]
    parts = {axis: _differences_on_axis(axis, firsts) for axis in axes}
    found = []
    for i, members in enumerate(sets):
        own = {axis: words[i] for axis, words in parts.items()}
        origins = {run.settings.get("init_from", "") for run in members}
        if own.get("weights") and members[0].origin and len(origins) == 1:
            own["weights"] = f"from {origins.pop()}"
        found.append(RunSet(own, members))
    return found


def axes_of(runs: Sequence[Run]) -> list[str]:
    """Return the axes on which these runs must agree, even with one variant.

    On a task, models of different sizes can be compared: which of them solve it?
    """
    of_task = all("task" in run.data for run in runs)
    either = (*ROWS_OR_SECTIONS, "model") if of_task else ROWS_OR_SECTIONS
    known = {axis for run in runs for axis, words in words_by_axis(run).items() if words}
    return [axis for axis in words_by_axis(runs[0]) if axis in known and axis not in either]


def _differences_on_axis(axis: str, runs: Sequence[Run]) -> list[str]:
    """Return how each run differs from the others on this axis; "" for all if they are alike.

    The config file (`model=nano`) if its name explains the whole difference, otherwise the words.
    """
    words = [words_by_axis(run)[axis] for run in runs]
    files = [run.choices.get(axis, "") for run in runs]
    values, pairs = set(map(tuple, words)), {*zip(files, map(tuple, words), strict=True)}
    if len(values) == 1:
        return [""] * len(runs)
    if len(pairs) == len(values) == len({*files}) and "" not in files:
        return [f"{axis}={file}" for file in files]
    # A tokenizer's file is named too; then only what differs between runs of one file is left.
    named = axis == "tokenizer" and len({*files}) > 1 and "" not in files
    found = []
    for file, own in zip(files, words, strict=True):
        alike = [other for its, other in zip(files, words, strict=True) if its == file or not named]
        start = [f"{axis}={file}"] if named else []
        found.append(" ".join(start + [w for w in own if not all(w in other for other in alike)]))
    return found


def _order(runs: Sequence[Run]) -> list[object]:
    """Sort key: by text, then by parameters, then by the words, with 200 before 1,000."""
    params = min(run.metrics.get(PARAMS, 0.0) for run in runs)
    words = {axis: ", ".join(own) or "?" for axis, own in words_by_axis(runs[0]).items()}
    text = [words.pop(axis) for axis in ("data", "validation")]
    rest = " ".join(words.values()).replace(",", "")
    return [text, params, *(int(w) if w.isdecimal() else w for w in re.split(r"(\d+)", rest))]


def group_runs(runs: Sequence[Run]) -> Groups:
    """Group runs that may be averaged: those that differ in nothing but the seed.

    A group has one variant, text, code, device and starting weights, and the same value of each
    setting that affects the result. Groups get the shortest unique names.

    The name is the variant. If several groups share it, their differences follow: the config file
    (`model=nano`) where that explains them, otherwise the settings. For attention, parts and
    position, that is the file and the settings that differ within it. In an ablation (many groups,
    each a change to one of them), it is only the change. Learning rates are left out where each
    group has its own. Each group holds one run per seed, sorted by seed: the newest, because a
    repeat is no further sample.
    """
    runs = sorted(runs, key=lambda run: run.finished)
    places = DataFrame({"row": _number_rows(runs), "seed": [run.seed for run in runs]})
    counted = places.drop_duplicates(keep="last")
    groups = [[runs[i] for i in part.index] for _, part in counted.groupby("row")]
    firsts = [members[0] for members in groups]
    hidden = {RATE} if rates_differ(firsts) else set[str]()
    names = [run.variant for run in firsts]
    for variant in set(names):
        alike = [i for i, run in enumerate(firsts) if run.variant == variant]
        for i, words in zip(alike, tell_apart([firsts[i] for i in alike], hidden), strict=True):
            names[i] = " ".join([variant, *words])
    named: Groups = {}
    for i, (name, members) in enumerate(zip(names, groups, strict=True)):
        twins = names[:i].count(name)  # long values are cut, so two names may be equal
        name = f"{name} ({twins + 1})" if twins else name
        named[name] = sorted(members, key=lambda run: run.seed)
    return named


def _number_rows(runs: Sequence[Run], *but: str) -> Series:
    """Number the rows: runs get the same number if they differ in the seed alone.

    Settings named in `but` may differ, too. Device and starting weights are among `Run.settings`
    (`finished_runs.py`).
    """
    table = DataFrame(
        {"variant": run.variant, "code": run.code, "data": run.data.get("text_sha256", "")}
        | run.settings
        for run in runs
    )
    values = table.nunique(dropna=False).items()
    differ = [key for key, count in values if count > 1 and key not in but]
    return table.groupby(["variant", *differ], dropna=False, sort=False).ngroup()


def rates_differ(runs: Sequence[Run]) -> bool:
    """Whether rows have different learning rates, and no two rows differ only in that."""
    rates = {run.settings.get(RATE) for run in runs}
    return len(rates) > 1 and max(_number_rows(runs)) == max(_number_rows(runs, RATE))


def pick_baseline(groups: Groups, name: str | None) -> str | None:
    """Return the row called `name`, or the only row of the variant `name`; None without one.

    Without a name, return the `typical_row`.
    """
    if name is None:
        return typical_row(groups)
    rows = [row for row, members in groups.items() if members[0].variant == name]
    if name in groups:
        return name
    return rows[0] if len(rows) == 1 else None


def typical_row(groups: Groups) -> str:
    """Return the row, of `mha` if there is one, whose settings are most like those of the others.

    So changed rows are compared with an unchanged one; learning rates that each row has for itself
    do not count. On a tie, it is the one with the fewest words in its name, then the first in name
    order.
    """
    firsts = [members[0] for members in groups.values()]
    keys = {key for run in firsts for key in run.settings}
    keys -= {RATE} if rates_differ(firsts) else set()
    shared = dict(zip(groups, count_shared(firsts, keys), strict=True))
    rows = [row for row, members in groups.items() if members[0].variant == "mha"]
    return min(rows or groups, key=lambda row: (-shared[row], len(row.split()), row))
