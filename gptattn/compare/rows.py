"""Splits runs into sections to compare, and sections into rows, and names the rows.

The runs of a section agree in everything that losses depend on, such as text, validation, size and
budget. In a sweep over several settings, the rows compare the attention, and each value of another
setting gets its own section. The runs of a row differ only in the seed. The overrides that
distinguish a row from the others give its name.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from pandas import DataFrame, Series

from gptattn.compare.finished_runs import Run
from gptattn.errors import ConfigError
from gptattn.runs.folder import TUNING
from gptattn.runs.metrics import PARAMS
from gptattn.runs.overrides import ATTENTION, find_default, read_typed, trim_overrides, value_of
from gptattn.settings.values import suggest

Groups = dict[str, list[Run]]

OF_VARIANT = ("attn", "recipe", "pattern", "part")  # settings that the variant's name contains
RATE, WIDTH = "optim.lr", "model.d_mlp"  # chosen by `tune` and by `match`
UNSET = "unset"  # for a run without the setting; `none` and `None` are values
SIZES = ("num_layers", "d_model", "context_length", "vocab_size")
NOT_OF_TASK = ("data._target_", "data.val_rows", "data.vocab_size")  # on other axes
OF_TEXT = ("data", "tokenizer", "validation", "task")  # never compare losses across these
# Axes that `by` can compare, with their settings.
AXES = {
    "model": (*(f"model.{size}" for size in SIZES), WIDTH),
    "budget": ("budget",),
    "batch_size": ("batch_size",),
    "precision": ("trainer.precision",),
    "device": ("device",),
    "weights": ("init_from",),
}
LONGEST = 60  # characters of a value in a name


class RunSet(NamedTuple):
    """Runs that can be compared with each other."""

    title_parts: Mapping[str, str]  # how it differs from the other sets, by axis; "": it does not
    runs: list[Run]


def words_by_axis(run: Run) -> dict[str, list[str]]:
    """Return the run's values on each axis, in words such as `d_model=64`."""
    settings, data = run.settings, run.data
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
    target = settings.get("tokenizer._target_", "").rpartition(".")[2]
    tokenizer = " ".join(filter(None, [data.get("tokenizer", ""), target])) or "?"
    # The path is left out: a tokenizer file is identified by its sha256.
    own = [k for k in settings if k.startswith("tokenizer.")]
    own = [k for k in own if k not in ("tokenizer._target_", "tokenizer.path")]
    sizes = [f"{key}={settings.get(f'model.{key}')}" for key in SIZES]
    return {
        "data": source,
        "tokenizer": [tokenizer, *(_word(k.partition(".")[2], settings[k]) for k in own)],
        "validation": [f"{k}={v}" for k, v in settings.items() if k.startswith("validation.")],
        "task": task,
        "model": [*sizes, f"d_mlp={run.mlp_width}"],
        "budget": [re.sub(r"(?<![\d.])\d{4,}", lambda n: f"{int(n[0]):,}", settings["budget"])],
        "batch_size": [f"batch_size={settings.get('batch_size')}"],
        "precision": [f"trainer.precision={settings.get('trainer.precision')}"],
        "device": [f"device={settings.get('device')}"],
        "weights": ["from other weights" if "init_from" in settings else "from scratch"],
    }


def _word(key: str, value: str) -> str:
    """Return `key=value`; a value too long for a name, such as a vocabulary, becomes a hash."""
    digest = hashlib.sha256(value.encode()).hexdigest()[:8]
    return f"{key}={value if len(value) <= LONGEST else f'#{digest}'}"


def comparable_sets(runs: Sequence[Run], by: Sequence[str] = ()) -> list[RunSet]:
    """Split the runs into sets that can be compared, smaller models first.

    `by`: the settings to compare. By default that is the attention, or the first setting that was
    typed if the attention is the same. Raises ConfigError for one that cannot be compared.
    """
    words = DataFrame([words_by_axis(run) for run in runs]).map("\n".join)
    axes = [str(axis) for axis, values in words.items() if any(values)]
    table = _tabulate_typed(runs, by)
    typed = {str(key): values for key, values in table.items()}
    by = ["attn" if key in OF_VARIANT else key for key in by]
    compared = [key for key in typed if _is_named(key, by)]
    if not by:
        of_task = all("task" in run.data for run in runs)
        free = ("batch_size", "precision", "model" if of_task else "")
        always = words.groupby([axis for axis in axes if axis not in free]).ngroup()
        swept = [key for key in typed if _varies(typed[key], always)]
        compared = [key for key in swept if key.split(".")[0] in ATTENTION]
        if of_task and not compared:
            axes.remove("model")  # the question is which sizes solve the task
        compared = compared or swept[:1]
    named = [axis for axis, keys in AXES.items() if any(_is_named(k, by or compared) for k in keys)]
    axes = [axis for axis in axes if axis not in named]
    number = words.groupby(axes, sort=False).ngroup()
    row = table.groupby(compared).ngroup() if compared else number
    for key in [key for key in typed if key not in compared]:
        several = row.groupby([number, typed[key]]).nunique() > 1
        # Two of its values have several rows. Otherwise it is part of the rows, as in an ablation.
        crossed = max(several.groupby(level=0).sum()) > 1
        if _varies(typed[key], number) and (by or crossed):
            axes.append(key)
            words[key] = [_word(key, value) for value in typed[key]]
            number = words.groupby(axes, sort=False).ngroup()
    sets = [[*part.index] for _, part in words.groupby(number)]
    sets.sort(key=lambda one: _order(words.loc[one[0]], [runs[i] for i in one]))
    firsts = words.loc[[one[0] for one in sets]]
    title_parts = {axis: _differences_on_axis(axis, firsts[axis], runs) for axis in axes}
    run_sets = []
    for i, one in enumerate(sets):
        title = {axis: each[i] for axis, each in title_parts.items()}
        members = [runs[j] for j in one]
        origins = {run.settings.get("init_from", "") for run in members}
        if title.get("weights") and origins != {""} and len(origins) == 1:
            title["weights"] = f"from {origins.pop()}"
        run_sets.append(RunSet(title, members))
    return run_sets


def _tabulate_typed(runs: Sequence[Run], by: Sequence[str]) -> DataFrame:
    """Return the values of all settings that were typed for any of the runs, [runs, settings].

    Attention, parts, patterns and recipes share one column, `attn`.
    """
    keys = dict.fromkeys(key for run in runs for key in read_typed(run.overrides))
    if rates_are_chosen(runs):
        keys.pop(RATE, None)
    recorded = {key for run in runs for key in (*run.settings, *run.choices)}
    for key in by:
        if key.partition(".")[0] in OF_TEXT:
            raise ConfigError("by", f"losses cannot be compared across {key}; leave it out")
        if not any(_is_below(one, key) for one in recorded) and key not in ATTENTION:
            raise ConfigError("by", f"no run has {key!r}; {suggest(key, keys)}")
    others = [key for key in dict.fromkeys([*keys, *by]) if key not in OF_VARIANT]
    return DataFrame({"attn": run.variant} | {k: _value(k, run) for k in others} for run in runs)


def _varies(values: Series, number: Series) -> bool:
    """Whether the values differ between runs with the same number."""
    return max(values.groupby(number).nunique()) > 1


def _is_below(key: str, name: str) -> bool:
    return key == name or key.startswith((f"{name}.", f"{name}["))


def _is_named(key: str, names: Collection[str]) -> bool:
    """Whether the setting is one of the names, lies in such a group, or is the group of one."""
    return any(_is_below(key, name) or _is_below(name, key) for name in names)


def _differences_on_axis(axis: str, words: Series, runs: Sequence[Run]) -> list[str]:
    """Return how each set differs from the others on this axis; "" for all if none differ.

    That is the config file (`model=nano`) if it explains the whole difference, or else the words.
    """
    files = [runs[i].choices.get(axis, "") for i in words.index]
    if words.nunique() == 1:
        return [""] * len(words)
    if len({*zip(files, words, strict=True)}) == words.nunique() == len({*files}) and all(files):
        return [f"{axis}={file}" for file in files]
    split = [one.split("\n") for one in words]
    return [" ".join(w for w in own if not all(w in other for other in split)) for own in split]


def _order(words: Series, runs: Sequence[Run]) -> list[object]:
    """Sort key: by text, then by parameters, then by the words, with 200 before 1,000."""
    params = min(run.metrics.get(PARAMS, 0.0) for run in runs)
    text = [words.pop(axis) for axis in ("data", "validation")]
    rest = " ".join(word or "?" for word in words).replace(",", "")
    return [text, params, *(int(w) if w.isdecimal() else w for w in re.split(r"(\d+)", rest))]


def group_runs(runs: Sequence[Run]) -> Groups:
    """Group the runs that differ only in the seed, and so can be averaged, by name.

    A group has one variant, text, code, device and starting weights, and the same value of each
    setting that affects the result. It holds one run per seed, sorted by seed: the newest, because
    a repeat is not another sample.
    """
    runs = sorted(runs, key=lambda run: run.finished)
    places = DataFrame({"row": _number_rows(runs), "seed": [run.seed for run in runs]})
    counted = places.drop_duplicates(keep="last")
    groups = [[runs[i] for i in part.index] for _, part in counted.groupby("row")]
    named: Groups = {}
    # The run that names its row: the newest one that has a name, or the first.
    firsts = [next((run for run in reversed(own) if run.name), own[0]) for own in groups]
    for name, members in zip(_name_rows(firsts), groups, strict=True):
        name += f" ({len(named) + 1})" * (name in named)  # two rows with the same `name`
        named[name] = sorted(members, key=lambda run: run.seed)
    return named


def _tabulate(runs: Sequence[Run]) -> DataFrame:
    """Return everything that a result depends on, except the seed, [runs, settings].

    Device and starting weights are among `Run.settings` (`finished_runs.py`).
    """
    return DataFrame(
        {"attn": run.variant, **run.settings, "code": run.code}
        | {"data.sha256": run.data.get("text_sha256", "")}
        for run in runs
    ).fillna(UNSET)


def pairs_of_parts(groups: Groups) -> list[tuple[str, list[list[Run]]]]:
    """Return four rows for each pair of parts: with neither, the first, the second, and both.

    Apart from what `tune` and `match` chose, they differ only in these parts. The four are named
    `gate with xsa`; if several have that name, the name of the row with both follows.
    """
    firsts = [own[0] for own in groups.values()]
    codes = [dict(run.provenance.code) if run.provenance else {} for run in firsts]
    common = set.intersection(*map(set, codes))  # modules; parts add others
    chosen = {RATE} if rates_are_chosen(firsts) else set[str]()
    rows = dict[tuple[frozenset[Any], tuple[Any, ...]], str]()
    for row, run, code in zip(groups, firsts, codes, strict=True):
        free = chosen | ({WIDTH} if run.match else set())
        parts = {name: set[Any]() for name in run.variant.split("+")[1:]}  # their order counts
        rest = set[Any]((key, code[key]) for key in common)
        rest.add(run.data.get("text_sha256"))
        for key, value in run.settings.items():
            own = parts.get(key.split(".")[1]) if key.startswith("part.") else None
            module = value.rpartition(".")[0] if key.endswith("._target_") else ""
            item = key, value, code.get(module) if own is not None else None
            (rest if own is None else own).update({item} if key not in free else ())
        ordered = tuple((name, frozenset(own)) for name, own in parts.items())
        rows[frozenset(rest), ordered] = row
    pairs = list[tuple[str, list[str]]]()
    for rest, parts in rows:
        for a, b in combinations(parts, 2):
            less = ((a, b), (b,), (a,), ())
            four = [(rest, tuple(one for one in parts if one not in out)) for out in less]
            if all(one in rows for one in four):
                pairs.append((f"{a[0]} with {b[0]}", [rows[one] for one in four]))
    names = Counter(name for name, _ in pairs)
    return [
        (f"{name} in {four[3]}" if names[name] > 1 else name, [groups[row] for row in four])
        for name, four in pairs
    ]


def _number_rows(runs: Sequence[Run], *but: str) -> Series:
    """Number the rows: runs that differ only in the seed, or in `but`, get the same number."""
    table = _tabulate(runs)
    differ = [key for key, count in table.nunique().items() if count > 1 and key not in but]
    return table.groupby(["attn", *differ], sort=False).ngroup()


def rates_differ(runs: Sequence[Run]) -> bool:
    """Whether rows have different learning rates, but no two rows differ only in the rate."""
    rates = {run.settings.get(RATE) for run in runs}
    return len(rates) > 1 and max(_number_rows(runs)) == max(_number_rows(runs, RATE))


def rates_are_chosen(runs: Sequence[Run]) -> bool:
    """Whether `tune` or the user chose a rate for each row, so that rates are not compared."""
    return any((run.folder.parent / TUNING).is_dir() for run in runs) or rates_differ(runs)


def _value(key: str, run: Run) -> str:
    """Return the file chosen in a group, the value of a setting, or all settings below it."""
    return value_of(key, run.choices, run.settings)


def _name_rows(firsts: Sequence[Run]) -> list[str]:
    """Name each row by its first run: the attention, and the overrides that others lack.

    Rows with equal names also get the settings that differ, as few as possible.
    """
    typed = dict.fromkeys(key for run in firsts for key in read_typed(run.overrides))
    if rates_are_chosen(firsts):
        typed.pop(RATE, None)
    varied = {key for key in typed if len({_value(key, run) for run in firsts}) > 1}
    names = [run.name or _name_row(run, varied, firsts) for run in firsts]
    table = _tabulate(firsts).to_dict("records")
    for name in [name for name, count in Counter(names).items() if count > 1]:
        rows = {i: table[i] for i, other in enumerate(names) if other == name}
        keys = _pick_settings([*rows.values()])
        for i, row in rows.items():
            names[i] = " ".join([name, *(_word(key, row[key]) for key in keys)])
    return names


def _pick_settings(rows: Sequence[Mapping[Any, str]]) -> list[str]:
    """Return the settings that distinguish the rows, as few as a greedy search finds."""

    def count(*keys: str) -> int:
        return len({tuple(row[key] for key in keys) for row in rows})

    keys = sorted(rows[0], key=lambda key: key in (RATE, WIDTH))  # last, as other settings set them
    chosen: list[str] = []
    while count(*chosen) < len(rows):
        chosen.append(max(keys, key=lambda key: count(*chosen, key)))
    return chosen


def _name_row(run: Run, varied: Collection[str], firsts: Sequence[Run]) -> str:
    """Return `gqa`, `gqa attn.num_kv_heads=1` or `mha part=[gate] model.dropout=0.1`."""
    typed = read_typed(run.overrides)
    if not typed:
        return run.variant
    head = next((key for key in ("recipe", "pattern") if key in typed), "attn")
    first = run.choices.get("attn", run.variant) if head == "attn" else _word(head, typed[head])
    keys = [key for key in typed if key in varied and key not in ("attn", head)]
    keys = [key for key in keys if _value(key, run) != _default(key, run, varied, firsts)]
    order = {group: i for i, group in enumerate(ATTENTION)}
    keys.sort(key=lambda key: order.get(key.partition(".")[0], len(order)))
    return " ".join([first, *(_word(key, typed[key]) for key in keys)])


def _default(key: str, run: Run, varied: Collection[str], firsts: Sequence[Run]) -> str | None:
    """Return the value that the run would have if the setting had not been typed."""
    rest = trim_overrides(key, run.overrides, run.choices, varied)
    if key.partition(".")[0] not in ATTENTION or "." not in key:
        for other in (one for one in firsts if one.overrides):  # a run without the override
            alike = trim_overrides(key, other.overrides, other.choices, varied) == rest
            if alike and key not in read_typed(other.overrides):
                return _value(key, other)
    return find_default(key, rest, run.choices)
