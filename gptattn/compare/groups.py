"""Groups runs that differ only in the seed, names the groups, and picks the baseline."""

from collections import Counter
from collections.abc import Callable, Sequence

from gptattn.compare.finished_runs import Run

Groups = dict[str, list[Run]]

# Beginnings of settings' names: what a variant's name stands for, and what a block's file sets.
OF_ATTENTION = ("attn.", "part.", "pattern")
OF_BLOCK = ("block.", "model.mlp", "model.qkv_bias")
OF_GROUP = {"attn": OF_ATTENTION, "block": OF_BLOCK}


def variant_of(run: Run) -> str:
    """Return the run's variant: the default name of its group."""
    return run.variant


def group_runs(runs: Sequence[Run], name_of: Callable[[Run], str] = variant_of) -> Groups:
    """Group runs that have the same variant, settings and code, under the shortest unique names.

    The name is the variant, or `name_of(run)`. If several groups share it, their differences
    follow: the config file (`model=nano`) where that explains them, otherwise the settings. Each
    group holds one run per seed, sorted by seed: the newest, as a repeat is no further sample.
    """
    groups: dict[tuple[tuple[str, str], ...], list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.finished):
        key = (("", run.variant), ("", run.code), *sorted(run.settings.items()))
        groups.setdefault(key, []).append(run)
    rivals: dict[str, list[Run]] = {}
    for members in groups.values():
        rivals.setdefault(name_of(members[0]), []).append(members[0])
    named: Groups = {}
    for members in groups.values():
        own = name_of(members[0])
        name = _unique_name(" ".join([own, *_differing(members[0], rivals[own])]), named)
        named[name] = sorted({run.seed: run for run in members}.values(), key=lambda run: run.seed)
    return named


def _differing(run: Run, rivals: Sequence[Run]) -> list[str]:
    """Return `key=value` for each difference between this run and the rivals of its name."""
    if len(rivals) == 1:
        return []
    keys = [k for k in sorted({k for r in rivals for k in r.settings}) if _varies(k, rivals)]
    groups, keys = by_choice(keys, rivals)
    names = [f"{group}={run.choices.get(group, '-')}" for group in groups]
    names += [f"{key}={run.settings.get(key, '-')[:20]}" for key in keys]
    twins = [rival for rival in rivals if rival.settings == run.settings]
    return names + ([f"code={run.code}"] if len(twins) > 1 else [])


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

    Without a name, return the first row of `mha`, or the first row of all, in name order.
    """
    if name is None:
        mha = [row for row, members in groups.items() if members[0].variant == "mha"]
        return min(mha or groups)
    if name in groups:
        return name
    rows = [row for row, members in groups.items() if members[0].variant == name]
    return rows[0] if len(rows) == 1 else None


def by_choice(keys: Sequence[str], runs: Sequence[Run]) -> tuple[list[str], list[str]]:
    """Return the config groups whose files explain how these settings differ, and the other keys.

    A file's name can replace its settings only if equal names mean equal settings.
    """
    found, keys = [], list(keys)
    for group in sorted({group for run in runs for group in run.choices}):
        own = [key for key in keys if key.startswith(OF_GROUP.get(group, (f"{group}.",)))]
        contents = {(r.choices.get(group), *(r.settings.get(k) for k in own)) for r in runs}
        if own and len(contents) == len({r.choices.get(group) for r in runs}):
            found.append(group)
            keys = [key for key in keys if key not in own]
    return found, keys


def differences_in_settings(groups: Groups) -> list[str]:
    """Return a line per setting outside the attention that differs and that a row's name lacks.

    Settings that a config file explains share one line.
    """
    firsts = {row: members[0] for row, members in groups.items()}
    keys = sorted({k for run in firsts.values() for k in run.settings})
    keys = [key for key in keys if not key.startswith(OF_ATTENTION)]
    if any(run.match for run in firsts.values()):
        keys = [key for key in keys if key not in ("model.d_mlp", "match", "match_to")]
    varying = [key for key in keys if _varies(key, [*firsts.values()])]
    chosen, others = by_choice(varying, [*firsts.values()])
    values = {
        group: {row: r.choices.get(group, "none") for row, r in firsts.items()} for group in chosen
    }
    values |= {
        key: {row: r.settings.get(key, "none") for row, r in firsts.items()} for key in others
    }
    lines = []
    for key, by_row in values.items():
        if all(f"{key}={value[:20]}" in row for row, value in by_row.items()):
            continue
        found = [by_row[row] for row, members in groups.items() for _ in members]
        lines.append(f"the variants differ in more than attention: {key} ({counted(found)})")
    return lines
