"""Splits runs into sections to compare, and sections into rows, and names the rows.

The runs of a section agree in what losses depend on: text, validation, size, budget and the like.
Of a sweep over several settings the attention is compared, and every other one is held: each of its
values is a section. The runs of a row differ only in the seed. A row is named by what was typed:
the overrides that tell it from the others.
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
from gptattn.runs.overrides import ATTENTION, find_default, leave_out, read_typed, value_of
from gptattn.settings.values import suggest

Groups = dict[str, list[Run]]

OF_VARIANT = ("attn", "recipe", "pattern", "part")  # its name tells them
RATE, WIDTH = "optim.lr", "model.d_mlp"  # which `tune` and `match` choose
UNSET = "unset"  # a run without the setting; `none` and `None` are values
SIZES = ("num_layers", "d_model", "context_length", "vocab_size")
NOT_OF_TASK = ("data._target_", "data.val_rows", "data.vocab_size")  # other axes have them
OF_TEXT = ("data", "tokenizer", "validation", "task")  # losses are not compared between its values
# Other axes, each with its settings, are compared on request.
AXES = {
    "model": (*(f"model.{size}" for size in SIZES), WIDTH),
    "budget": ("budget",),
    "batch_size": ("batch_size",),
    "precision": ("trainer.precision",),
    "device": ("device",),
    "weights": ("init_from",),
}
LONGEST = 60  # characters of a value


class RunSet(NamedTuple):
    """Runs that can be compared with each other."""

    parts: Mapping[str, str]  # how it differs from the other sets, by axis; "": it does not
    runs: list[Run]


def words_by_axis(run: Run) -> dict[str, list[str]]:
    """Return the run's place on each axis, as words such as `d_model=64`."""
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
    """Return `key=value`, with a hash for what is too long for a name, such as a vocabulary."""
    digest = hashlib.sha256(value.encode()).hexdigest()[:8]
    return f"{key}={value if len(value) <= LONGEST else f'#{digest}'}"


def comparable_sets(runs: Sequence[Run], by: Sequence[str] = ()) -> list[RunSet]:
    """Split the runs into sets that can be compared, smaller models first.

    `by`: the settings to compare, instead of the attention, or of the first setting that was typed
    if the attention is the same. Raises ConfigError for one that cannot be compared.
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
            axes.remove("model")  # which sizes solve it?
        compared = compared or swept[:1]
    named = [axis for axis, keys in AXES.items() if any(_is_named(k, by or compared) for k in keys)]
    axes = [axis for axis in axes if axis not in named]
    number = words.groupby(axes, sort=False).ngroup()
    row = table.groupby(compared).ngroup() if compared else number
    for key in [key for key in typed if key not in compared]:
        several = row.groupby([number, typed[key]]).nunique() > 1
        # Two of its values have several rows; if not, it belongs to the rows, as in an ablation.
        crossed = max(several.groupby(level=0).sum()) > 1
        if _varies(typed[key], number) and (by or crossed):
            axes.append(key)
            words[key] = [_word(key, value) for value in typed[key]]
            number = words.groupby(axes, sort=False).ngroup()
    sets = [[*part.index] for _, part in words.groupby(number)]
    sets.sort(key=lambda one: _order(words.loc[one[0]], [runs[i] for i in one]))
    firsts = words.loc[[one[0] for one in sets]]
    parts = {axis: _differences_on_axis(axis, firsts[axis], runs) for axis in axes}
    found = []
    for i, one in enumerate(sets):
        own, members = {axis: each[i] for axis, each in parts.items()}, [runs[j] for j in one]
        origins = {run.settings.get("init_from", "") for run in members}
        if own.get("weights") and origins != {""} and len(origins) == 1:
            own["weights"] = f"from {origins.pop()}"
        found.append(RunSet(own, members))
    return found


def _tabulate_typed(runs: Sequence[Run], by: Sequence[str]) -> DataFrame:
    """Return the values of the settings that were typed for some run, [runs, settings].

    Attention, parts, patterns and recipes are one column, `attn`.
    """
    keys = dict.fromkeys(key for run in runs for key in read_typed(run.overrides))
    if rates_are_chosen(runs):
        keys.pop(RATE, None)
    known = {key for run in runs for key in (*run.settings, *run.choices)}
    for key in by:
        if key.partition(".")[0] in OF_TEXT:
            raise ConfigError("by", f"losses on another {key} cannot be compared; leave it out")
        if not any(_is_below(one, key) for one in known) and key not in ATTENTION:
            raise ConfigError("by", f"no run has {key!r}; {suggest(key, keys)}")
    others = [key for key in dict.fromkeys([*keys, *by]) if key not in OF_VARIANT]
    return DataFrame({"attn": run.variant} | {k: _value(k, run) for k in others} for run in runs)


def _varies(values: Series, number: Series) -> bool:
    """Whether the values differ between runs of one number."""
    return max(values.groupby(number).nunique()) > 1


def _is_below(key: str, name: str) -> bool:
    return key == name or key.startswith((f"{name}.", f"{name}["))


def _is_named(key: str, names: Collection[str]) -> bool:
    """Whether the setting is one of the names, in such a group, or the group of one."""
    return any(_is_below(key, name) or _is_below(name, key) for name in names)


def _differences_on_axis(axis: str, words: Series, runs: Sequence[Run]) -> list[str]:
    """Return how each set differs from the others on this axis; "" for all if they are alike.

    The config file (`model=nano`) if its name explains the whole difference, otherwise the words.
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
    """Group runs that may be averaged, by name: those that differ in nothing but the seed.

    A group has one variant, text, code, device and starting weights, and the same value of each
    setting that affects the result. It holds one run per seed, sorted by seed: the newest, because
    a repeat is no further sample.
    """
    runs = sorted(runs, key=lambda run: run.finished)
    places = DataFrame({"row": _number_rows(runs), "seed": [run.seed for run in runs]})
    counted = places.drop_duplicates(keep="last")
    groups = [[runs[i] for i in part.index] for _, part in counted.groupby("row")]
    named: Groups = {}
    # The run that names its row: the newest that was given a name, or the first.
    firsts = [next((run for run in reversed(own) if run.name), own[0]) for own in groups]
    for name, members in zip(_name_rows(firsts), groups, strict=True):
        name += f" ({len(named) + 1})" * (name in named)  # someone's own `name`
        named[name] = sorted(members, key=lambda run: run.seed)
    return named


def _tabulate(runs: Sequence[Run]) -> DataFrame:
    """Return all that a result depends on but the seed, [runs, settings].

    Device and starting weights are among `Run.settings` (`finished_runs.py`).
    """
    return DataFrame(
        {"attn": run.variant, **run.settings, "code": run.code}
        | {"data.sha256": run.data.get("text_sha256", "")}
        for run in runs
    ).fillna(UNSET)


def pairs_of_parts(groups: Groups) -> list[tuple[str, list[list[Run]]]]:
    """Return the four rows of each two parts: without both, with the first, the second, with both.

    They differ in these parts alone, besides what `tune` and `match` chose. The name of the four is
    `gate with xsa`, with the last row's where several would have that name.
    """
    firsts = [own[0] for own in groups.values()]
    codes = [dict(run.provenance.code) if run.provenance else {} for run in firsts]
    common = set.intersection(*map(set, codes))  # modules, of which parts have further ones
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
    found = list[tuple[str, list[str]]]()
    for rest, parts in rows:
        for a, b in combinations(parts, 2):
            less = ((a, b), (b,), (a,), ())
            four = [(rest, tuple(one for one in parts if one not in out)) for out in less]
            if all(one in rows for one in four):
                found.append((f"{a[0]} with {b[0]}", [rows[one] for one in four]))
    names = Counter(name for name, _ in found)
    return [
        (f"{name} in {four[3]}" if names[name] > 1 else name, [groups[row] for row in four])
        for name, four in found
    ]


def _number_rows(runs: Sequence[Run], *but: str) -> Series:
    """Number the rows: runs get the same number if they differ in the seed, or `but`, alone."""
    table = _tabulate(runs)
    differ = [key for key, count in table.nunique().items() if count > 1 and key not in but]
    return table.groupby(["attn", *differ], sort=False).ngroup()


def rates_differ(runs: Sequence[Run]) -> bool:
    """Whether rows have different learning rates, and no two rows differ only in that."""
    rates = {run.settings.get(RATE) for run in runs}
    return len(rates) > 1 and max(_number_rows(runs)) == max(_number_rows(runs, RATE))


def rates_are_chosen(runs: Sequence[Run]) -> bool:
    """Whether rates are not what is compared: `tune`, or the user, chose one for each row."""
    return any((run.folder.parent / TUNING).is_dir() for run in runs) or rates_differ(runs)


def _value(key: str, run: Run) -> str:
    """Return the file chosen in a group, or the value of a setting, or all that is below it."""
    return value_of(key, run.choices, run.settings)


def _name_rows(firsts: Sequence[Run]) -> list[str]:
    """Name each row by its first run: the attention, and what was typed that others lack.

    Rows of equal names get the settings that differ, as few as will do.
    """
    typed = dict.fromkeys(key for run in firsts for key in read_typed(run.overrides))
    if rates_are_chosen(firsts):
        typed.pop(RATE, None)
    told = {key for key in typed if len({_value(key, run) for run in firsts}) > 1}
    names = [run.name or _name_row(run, told, firsts) for run in firsts]
    table = _tabulate(firsts).to_dict("records")
    for name in [name for name, count in Counter(names).items() if count > 1]:
        rows = {i: table[i] for i, other in enumerate(names) if other == name}
        keys = _tell_apart([*rows.values()])
        for i, row in rows.items():
            names[i] = " ".join([name, *(_word(key, row[key]) for key in keys)])
    return names


def _tell_apart(rows: Sequence[Mapping[Any, str]]) -> list[str]:
    """Return the settings that tell the rows apart, as few as a greedy search finds."""

    def count(*keys: str) -> int:
        return len({tuple(row[key] for key in keys) for row in rows})

    keys = sorted(rows[0], key=lambda key: key in (RATE, WIDTH))  # chosen, for another difference
    chosen: list[str] = []
    while count(*chosen) < len(rows):
        chosen.append(max(keys, key=lambda key: count(*chosen, key)))
    return chosen


def _name_row(run: Run, told: Collection[str], firsts: Sequence[Run]) -> str:
    """Return `gqa`, `gqa attn.num_kv_heads=1` or `mha part=[gate] model.dropout=0.1`."""
    typed = read_typed(run.overrides)
    if not typed:
        return run.variant
    head = next((key for key in ("recipe", "pattern") if key in typed), "attn")
    first = run.choices.get("attn", run.variant) if head == "attn" else _word(head, typed[head])
    keys = [key for key in typed if key in told and key not in ("attn", head)]
    keys = [key for key in keys if _value(key, run) != _default(key, run, told, firsts)]
    order = {group: i for i, group in enumerate(ATTENTION)}
    keys.sort(key=lambda key: order.get(key.partition(".")[0], len(order)))
    return " ".join([first, *(_word(key, typed[key]) for key in keys)])


def _default(key: str, run: Run, told: Collection[str], firsts: Sequence[Run]) -> str | None:
    """Return the value that the run would have if the setting had not been typed."""
    rest = leave_out(key, run.overrides, run.choices, told)
    if key.partition(".")[0] not in ATTENTION or "." not in key:
        for other in (one for one in firsts if one.overrides):  # one that leaves it out shows it
            alike = leave_out(key, other.overrides, other.choices, told) == rest
            if alike and key not in read_typed(other.overrides):
                return _value(key, other)
    return find_default(key, rest, run.choices)
