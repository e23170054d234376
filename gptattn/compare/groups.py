"""Groups runs that differ only in the seed, names the groups, and picks the baseline."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence

from gptattn.compare.finished_runs import Run
from gptattn.model.kinds import default_width

Groups = dict[str, list[Run]]

# Beginnings of settings' names: what a variant's name stands for, and what a block's file sets.
OF_ATTENTION = ("attn.", "part.", "pattern")
OF_BLOCK = ("block.", "model.mlp", "model.qkv_bias")
OF_GROUP = {"attn": OF_ATTENTION, "block": OF_BLOCK}
# Groups whose files have settings of their own: one file need not know those of another.
OPEN = ("attn", "part", "position")
RATE = "optim.lr"
WIDTH = "model.d_mlp"
UNSET = "unset"  # a run without the setting; `none` and `None` are values


def variant_of(run: Run) -> str:
    """Return the run's variant: the default name of its group."""
    return run.variant


def group_runs(runs: Sequence[Run], name_of: Callable[[Run], str] = variant_of) -> Groups:
    """Group runs that have the same variant, settings and code, under the shortest unique names.

    The name is the variant, or `name_of(run)`. If several groups share it, their differences
    follow: the config file (`model=nano`) where that explains them, otherwise the settings; of
    attention, parts and position the file and what differs between runs of the same file. Learning
    rates are left out where each group has its own. Each group holds one run per seed, sorted by
    seed: the newest, as a repeat is no further sample.
    """
    groups: dict[tuple[tuple[str, str], ...], list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.finished):
        key = (("", run.variant), ("", run.code), *sorted(run.settings.items()))
        groups.setdefault(key, []).append(run)
    rivals: dict[str, list[Run]] = {}
    for members in groups.values():
        rivals.setdefault(name_of(members[0]), []).append(members[0])
    hidden = {RATE} if _own_rates([members[0] for members in groups.values()]) else set[str]()
    named: Groups = {}
    for members in groups.values():
        own = name_of(members[0])
        name = _unique_name(" ".join([own, *_differing(members[0], rivals[own], hidden)]), named)
        named[name] = sorted({run.seed: run for run in members}.values(), key=lambda run: run.seed)
    return named


def rates_differ(groups: Groups) -> bool:
    """Whether the groups differ in learning rate, and each has its own."""
    return _own_rates([members[0] for members in groups.values()])


def _own_rates(firsts: Sequence[Run]) -> bool:
    """Whether the learning rate, of which there are several, is not all that parts two groups."""
    rates: dict[tuple[object, ...], set[str]] = {}
    for run in firsts:
        others = sorted((key, value) for key, value in run.settings.items() if key != RATE)
        rates.setdefault((run.variant, run.code, *others), set()).add(run.settings.get(RATE, UNSET))
    return len(set().union(*rates.values())) > 1 and all(len(own) == 1 for own in rates.values())


def width_before(run: Run) -> str:
    """Return the MLP width as it was before `match` changed it."""
    width = run.settings.get(WIDTH, "None")
    if run.match is not None and run.match.field == WIDTH:
        width = f"{run.match.before:g}" if run.match.before else "None"
    elif run.settings.get("match") in ("params", "flops"):
        width = "None"  # the width before is unknown: most likely the default
    d_model = run.settings.get("model.d_model", "")
    # Runs from before model.mlp was a setting have GELU.
    mlp = "swiglu" if run.settings.get("model.mlp") == "swiglu" else "gelu"
    default = str(default_width(mlp, int(d_model))) if d_model.isdecimal() else "None"
    return "default" if width in ("None", default) else width


def _differing(run: Run, rivals: Sequence[Run], hidden: Collection[str]) -> list[str]:
    """Return `key=value` for each difference between this run and the rivals of its name."""
    if len(rivals) == 1:
        return []
    keys = {k for r in rivals for k in r.settings if k not in hidden}
    keys = [k for k in sorted(keys) if _varies(k, rivals)]
    if len(keys) > 1 and len({width_before(rival) for rival in rivals}) == 1:
        keys = [k for k in keys if k != WIDTH]  # `match` chose it, for a difference named here
    words = _words(keys, run, rivals)
    names = [f"{key}={value[:20]}" for own in words.values() for key, value in own]
    twins = [rival for rival in rivals if rival.settings == run.settings]
    return names + ([f"code={run.code}"] if len(twins) > 1 else [])


def _words(keys: Sequence[str], run: Run, runs: Sequence[Run]) -> dict[str, list[tuple[str, str]]]:
    """Return group or setting -> (name, value) pairs that tell the run by it from the others.

    `keys` are the settings that vary between the runs, of which the run is one.
    """
    chosen, rest = by_choice(keys, runs)
    words = {group: [(group, run.choices.get(group, UNSET))] for group in chosen}
    for group in OPEN:
        own = [key for key in rest if f"{key}.".startswith(f"{group}.")]
        if own:
            words[group] = _open_words(group, own, run, runs)
            rest = [key for key in rest if key not in own]
    return words | {key: [(key, run.settings.get(key, UNSET))] for key in rest}


def _open_words(
    group: str, keys: Sequence[str], run: Run, runs: Sequence[Run]
) -> list[tuple[str, str]]:
    """Return the run's choice if it varies, and what varies between runs of the same choice.

    A class is named by its choice alone. A setting that is null is as good as absent, so it is left
    out, unless some run of the same choice really lacks it.
    """
    choice = _choice(group, run)
    alike = [other for other in runs if _choice(group, other) == choice]
    words = [(group, choice)] if len(alike) < len(runs) else []
    for key in keys:
        value, values = run.settings.get(key), {other.settings.get(key) for other in alike}
        if value is None or len(values) == 1 or key.endswith("_target_"):
            continue
        if value != "None" or None in values:
            words.append((key, value))
    return words


def _choice(group: str, run: Run) -> str:
    """Return what the run has of an open group: a file, or the class if no file is recorded.

    Attention and parts are in the variant's name.
    """
    if group != "position":
        return run.variant
    target = run.settings.get(f"{group}._target_", UNSET).rpartition(".")[2]
    return run.choices.get(group, target)


def _varies(key: str, runs: Sequence[Run]) -> bool:
    return len({run.settings.get(key) for run in runs}) > 1


def _unique_name(name: str, taken: Groups) -> str:
    """Return the name, numbered if taken: cut values can make two names equal."""
    count = 2
    unique = name
    while unique in taken:
        unique, count = f"{name} ({count})", count + 1
    return unique


def counted(values: Sequence[str]) -> str:
    """Count equal values: `1000 steps: 12 runs; 2000 steps: 3 runs`, the most frequent first."""
    most = Counter(values).most_common()
    shown = [f"{value}: {count} run{'s' * (count > 1)}" for value, count in most[:5]]
    return "; ".join(shown) + (f"; and {len(most) - 5} more" if len(most) > 5 else "")


def pick_baseline(groups: Groups, name: str | None) -> str | None:
    """Return the row called `name`, or the only row of the variant `name`; None without one.

    Without a name, return the row of `mha` whose settings most often equal those of the other rows,
    so that a row that was changed is held against one that was not; learning rates that each row
    has for itself do not count. Of equals, the one with the
    fewest words in its name, then the first in name order. Without `mha`, the first row of all in
    name order.
    """
    if name is None:
        mha = [row for row, members in groups.items() if members[0].variant == "mha"]
        if not mha:
            return min(groups)
        firsts = [members[0] for members in groups.values()]
        hidden = {RATE} if rates_differ(groups) else set[str]()
        shared = {row: _shared(groups[row][0], firsts, hidden) for row in mha}
        return min(mha, key=lambda row: (-shared[row], len(row.split()), row))
    if name in groups:
        return name
    rows = [row for row, members in groups.items() if members[0].variant == name]
    return rows[0] if len(rows) == 1 else None


def _shared(run: Run, runs: Sequence[Run], hidden: Collection[str]) -> int:
    """Count the runs that share each setting; a setting that both lack is shared, too."""
    keys = {key for other in runs for key in other.settings if key not in hidden}
    return sum(run.settings.get(k) == other.settings.get(k) for k in keys for other in runs)


def by_choice(keys: Sequence[str], runs: Sequence[Run]) -> tuple[list[str], list[str]]:
    """Return the config groups whose files explain how these settings differ, and the other keys.

    A file's name can replace its settings only if equal names mean equal settings.
    """
    found, keys = [], list(keys)
    for group in sorted({group for run in runs for group in run.choices}):
        starts = OF_GROUP.get(group, (f"{group}.",))
        # The dot: a file without settings (position=none) is recorded as `position: {}`.
        own = [key for key in keys if f"{key}.".startswith(starts)]
        contents = {(r.choices.get(group), *(r.settings.get(k) for k in own)) for r in runs}
        if own and len(contents) == len({r.choices.get(group) for r in runs}):
            found.append(group)
            keys = [key for key in keys if key not in own]
    return found, keys


def differences_in_settings(groups: Groups) -> list[str]:
    """Return a line per setting outside the attention that differs and that a row's name lacks.

    Settings that a config file explains, and those of position, share one line.
    """
    firsts = {row: members[0] for row, members in groups.items()}
    keys = sorted({k for run in firsts.values() for k in run.settings})
    keys = [key for key in keys if not key.startswith(OF_ATTENTION)]
    if any(run.match for run in firsts.values()):
        keys = [key for key in keys if key not in (WIDTH, "match", "match_to")]
    varying = [key for key in keys if _varies(key, [*firsts.values()])]
    words = {row: _words(varying, run, [*firsts.values()]) for row, run in firsts.items()}
    lines = []
    for subject in next(iter(words.values()), {}):
        own = {row: words[row][subject] for row in groups}
        if all(f"{key}={value[:20]}" in row for row, pairs in own.items() for key, value in pairs):
            continue
        found = [_value(subject, own[row]) for row, members in groups.items() for _ in members]
        if subject == RATE and rates_differ(groups):
            lines.append(f"each variant has a learning rate of its own, lr: {counted(found)}")
            continue
        lines.append(f"the variants differ in more than attention: {subject} ({counted(found)})")
    return lines


def _value(subject: str, pairs: Sequence[tuple[str, str]]) -> str:
    """Return the pairs without the subject's name: `rope base=500.0`; `unset` for no pairs."""
    short = [
        value if key == subject else f"{key.removeprefix(f'{subject}.')}={value}"
        for key, value in pairs
    ]
    return " ".join(short) or UNSET
