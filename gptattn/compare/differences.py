"""Finds how runs differ, in settings, code and environment, and names rows by it.

A difference in settings is named by the config file that explains it, or else by the settings.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from gptattn.compare.finished_runs import Run
from gptattn.settings.config import OF_BLOCK, default_width

NAMES = 5  # module names in one line
# Prefixes of settings: what a variant's name stands for, and what a block's file sets.
OF_ATTENTION = ("attn.", "part.", "pattern")
OF_GROUP = {"attn": OF_ATTENTION, "block": OF_BLOCK}
# Groups whose files have their own settings, which other files need not have.
OPEN = ("attn", "part", "position")
RATE = "optim.lr"
WIDTH = "model.d_mlp"
UNSET = "unset"  # a run without the setting; `none` and `None` are values
# With more differences, rows are named by their change from the row that all others start from;
# with fewer, a name that says everything is short enough.
FEW = 3

# Group or setting -> the (name, value) pairs that identify a run by it.
Words = dict[str, list[tuple[str, str]]]


def setting_words(keys: Sequence[str], run: Run, runs: Sequence[Run]) -> Words:
    """Return the pairs that tell the run from the others, by group or setting.

    `keys` are the settings that vary between the runs, of which the run is one.
    """
    chosen, rest = _by_choice(keys, runs)
    words = {group: [(group, run.choices.get(group, UNSET))] for group in chosen}
    for group in OPEN:
        own = [key for key in rest if f"{key}.".startswith(f"{group}.")]
        if own:
            words[group] = _open_words(group, own, run, runs)
            rest = [key for key in rest if key not in own]
    return words | {key: _word(key, run) for key in rest}


def _by_choice(keys: Sequence[str], runs: Sequence[Run]) -> tuple[list[str], list[str]]:
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


def _open_words(
    group: str, keys: Sequence[str], run: Run, runs: Sequence[Run]
) -> list[tuple[str, str]]:
    """Return the run's choice if it varies, and what varies between runs of the same choice.

    A class is named by its choice alone. A null setting counts as absent and is left out, unless
    some run of the same choice really lacks it.
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
    """Return the run's choice in an open group: a file, or the class if no file is recorded.

    Attention and parts are in the variant's name.
    """
    if group != "position":
        return run.variant
    target = run.settings.get(f"{group}._target_", UNSET).rpartition(".")[2]
    return run.choices.get(group, target)


def _word(key: str, run: Run) -> list[tuple[str, str]]:
    """Return the setting; nothing if its group, null or not, explains why it is missing."""
    value = run.settings.get(key)
    related = (k for k in run.settings if k.startswith(f"{key}.") or key.startswith(f"{k}."))
    if value is None and any(related):
        return []
    return [(key, UNSET if value is None else value)]


def varies(key: str, runs: Sequence[Run]) -> bool:
    """Whether the runs differ in this setting."""
    return len({run.settings.get(key) for run in runs}) > 1


def tell_apart(rivals: Sequence[Run], hidden: Collection[str]) -> list[list[str]]:
    """Return for each run the `key=value` words that tell it from the others of its name."""
    if len(rivals) == 1:
        return [[]]
    keys = {k for r in rivals for k in r.settings if k not in hidden}
    keys = [k for k in sorted(keys) if varies(k, rivals)]
    if len(keys) > 1 and len({width_before(rival) for rival in rivals}) == 1:
        keys = [k for k in keys if k != WIDTH]  # `match` chose it, for a difference named here
    words = [setting_words(keys, run, rivals) for run in rivals]
    if len(words[0]) > FEW and (origin := _origin(keys, rivals)) is not None:
        ordinary = words[origin]
        words = [
            {
                subject: pairs or _nulls(ordinary[subject], run)
                for subject, pairs in own.items()
                if pairs != ordinary[subject]
            }
            for run, own in zip(rivals, words, strict=True)
        ]
    found = []
    for run, own in zip(rivals, words, strict=True):
        names = [f"{key}={value[:20]}" for pairs in own.values() for key, value in pairs]
        twins = [rival for rival in rivals if rival.settings == run.settings]
        found.append(names + ([f"code={run.code}"] if len(twins) > 1 else []))
    return found


def _nulls(words: Sequence[tuple[str, str]], run: Run) -> list[tuple[str, str]]:
    """Return these settings as the run has them; `setting_words` leaves out null ones."""
    return [(key, run.settings[key]) for key, _ in words if key in run.settings]


def _origin(keys: Collection[str], runs: Sequence[Run]) -> int | None:
    """Return the run that shares most of these settings with the others; None on a tie."""
    shared = count_shared(runs, keys)
    most = max(shared)
    return shared.index(most) if shared.count(most) == 1 else None


def count_shared(runs: Sequence[Run], keys: Collection[str]) -> list[int]:
    """Return for each run how many equal settings it has, summed over all runs; absence counts."""
    values = {key: Counter(run.settings.get(key) for run in runs) for key in keys}
    return [sum(values[key][run.settings.get(key)] for key in keys) for run in runs]


def differences_in_settings(
    groups: Mapping[str, Sequence[Run]], baseline: str, *, own_rates: bool
) -> list[str]:
    """Return a line per setting outside the attention that differs and that a row's name lacks.

    Settings that a config file explains, and those of position, share one line.
    """
    firsts = {row: members[0] for row, members in groups.items()}
    keys = sorted({k for run in firsts.values() for k in run.settings})
    keys = [key for key in keys if not key.startswith(OF_ATTENTION)]
    if any(run.match for run in firsts.values()):
        keys = [key for key in keys if key not in (WIDTH, "match", "match_to")]
    varying = [key for key in keys if varies(key, [*firsts.values()])]
    words = {row: setting_words(varying, run, [*firsts.values()]) for row, run in firsts.items()}
    lines = []
    for subject in next(iter(words.values()), {}):
        own = {row: words[row][subject] for row in groups}
        if _is_named(subject, own, baseline):
            continue
        found = [_value(subject, own[row]) for row, members in groups.items() for _ in members]
        if subject == RATE and own_rates:
            lines.append(f"each variant has a learning rate of its own, lr: {count_values(found)}")
            continue
        lines.append(
            f"the variants differ in more than attention: {subject} ({count_values(found)})"
        )
    return lines


def _is_named(subject: str, words: Mapping[str, Sequence[tuple[str, str]]], baseline: str) -> bool:
    """Whether the rows' names tell their words on the subject, except perhaps the baseline's."""
    null_group = f"{subject.rpartition('.')[0]}="  # tells of all that is in the group
    told = {
        row: all(f"{key}={value[:20]}" in row for key, value in pairs)
        for row, pairs in words.items()
    }
    as_ever = None if told[baseline] else words[baseline]
    some = any(told[row] and (pairs or null_group in row) for row, pairs in words.items())
    return some and all(told[row] or pairs == as_ever for row, pairs in words.items())


def _value(subject: str, pairs: Sequence[tuple[str, str]]) -> str:
    """Return the pairs without the subject's name: `rope base=500.0`; `unset` for no pairs."""
    short = [
        value if key == subject else f"{key.removeprefix(f'{subject}.')}={value}"
        for key, value in pairs
    ]
    return " ".join(short) or UNSET


def width_before(run: Run) -> str:
    """Return the MLP width as it was before `match` changed it."""
    width = run.settings.get(WIDTH, "None")
    if run.match is not None and run.match.field == WIDTH:
        width = f"{run.match.before:g}" if run.match.before else "None"
    d_model = run.settings.get("model.d_model", "")
    mlp = "swiglu" if run.settings.get("model.mlp") == "swiglu" else "gelu"
    default = str(default_width(mlp, int(d_model))) if d_model.isdecimal() else "None"
    return "default" if width in ("None", default) else width


def count_values(values: Sequence[str]) -> str:
    """Count equal values: `1000 steps: 12 runs; 2000 steps: 3 runs`, the most frequent first."""
    most = Counter(values).most_common()
    shown = [f"{value}: {count} run{'s' * (count > 1)}" for value, count in most[:5]]
    return "; ".join(shown) + (f"; and {len(most) - 5} more" if len(most) > 5 else "")


def differences_in_making(runs: Sequence[Run]) -> list[str]:
    """Return one line for each difference in code or environment between the runs."""
    runs = list({run.folder: run for run in runs}.values())  # an extended run may occur twice
    lines = []
    unknown = [run for run in runs if run.making is None]
    if unknown:
        lines.append(f"the code of {_count_runs(unknown)} is unknown: it was not recorded")
    resumed = [run for run in runs if run.making and run.making.earlier]
    if resumed:
        lines.append(f"{_count_runs(resumed)} resumed with different code or schedule")
    if names := _differing_modules(runs):
        lines.append(f"the runs differ in code that affects results: {_listed(names)}")
    return lines + _differences_in_environment(runs)


def _differing_modules(runs: Sequence[Run]) -> list[str]:
    """Return the modules whose hash differs between the runs that have them."""
    hashes: dict[str, set[str]] = {}
    for run in runs:
        for name, value in run.making.code.items() if run.making else ():
            hashes.setdefault(name, set()).add(value)
    return sorted(name for name, values in hashes.items() if len(values) > 1)


def _differences_in_environment(runs: Sequence[Run]) -> list[str]:
    lines = []
    for key in sorted({k for run in runs for k in run.environment if k != "platform"}):
        values = [run.environment.get(key, "unknown") for run in runs]
        if len(set(values)) > 1:
            shown = count_values([_short(value) for value in values])
            lines.append(f"the runs differ in {key.removeprefix('libraries.')} ({shown})")
    return lines


def _short(value: str) -> str:
    """Shorten a commit to twelve digits, and keep a `-dirty` mark."""
    commit, dash, dirty = value.partition("-dirty")
    return f"{commit[:12] if len(commit) == 40 else commit[:40]}{dash}{dirty}"


def _count_runs(runs: Sequence[Run]) -> str:
    return "1 run" if len(runs) == 1 else f"{len(runs)} runs"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMES} more" if len(names) > NAMES else ""
    return ", ".join(names[:NAMES]) + more
