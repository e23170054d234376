"""Finds how runs differ in settings, code and environment, and names rows accordingly.

A difference in settings is named after the config file that explains it, or after the settings.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from gptattn.compare.finished_runs import Run
from gptattn.settings.config import OF_BLOCK, default_width

MAX_NAMES = 5  # module names in one line
# Prefixes of settings: what a variant's name stands for, and what a block's file sets.
OF_ATTENTION = ("attn.", "part.", "pattern", "layers.")
OF_GROUP = {"attn": OF_ATTENTION, "block": OF_BLOCK}
# Groups whose files have their own settings, which other files need not have.
OPEN = ("attn", "part", "position")
RATE = "optim.lr"
WIDTH = "model.d_mlp"
UNSET = "unset"  # a run without the setting; `none` and `None` are values
# With more differences, rows are named by their change from the row that all others start from;
# with fewer, a name that says everything is short enough.
FEW = 3
LONGEST = 20  # characters of a value in a name

# Subject (a config group or a setting) -> for each run, the settings that identify it there.
Words = dict[str, list[dict[str, str]]]


def setting_words(keys: Sequence[str], runs: Sequence[Run]) -> Words:
    """Return how the runs differ, by subject; `keys` are the settings that vary.

    A config group is named by its files if these explain how its settings differ: equal names mean
    equal settings. Of an open group the file is named, and what varies between runs of one file.
    """
    words: Words = {}
    rest = list(keys)
    for group in sorted({group for run in runs for group in run.choices}):
        own = _of_group(rest, OF_GROUP.get(group, (f"{group}.",)))
        files = [run.choices.get(group, UNSET) for run in runs]
        contents = {
            (file, *map(run.settings.get, own)) for file, run in zip(files, runs, strict=True)
        }
        if own and len(contents) == len(set(files)):
            words[group] = [{group: file} for file in files]
            rest = [key for key in rest if key not in own]
    for group in OPEN:
        if own := _of_group(rest, (f"{group}.",)):
            words[group] = _words_of_open_group(group, own, runs)
            rest = [key for key in rest if key not in own]
    return words | {key: [_words_of_setting(key, run) for run in runs] for key in rest}


def _of_group(keys: Sequence[str], starts: tuple[str, ...]) -> list[str]:
    # The dot: a file without settings (position=none) is recorded as `position: {}`.
    return [key for key in keys if f"{key}.".startswith(starts)]


def _words_of_open_group(
    group: str, keys: Sequence[str], runs: Sequence[Run]
) -> list[dict[str, str]]:
    """Return each run's choice, if choices vary, and what varies between runs of that choice.

    A class is named by its choice alone. A null setting counts as absent and is left out, unless
    some run of the same choice really lacks it.
    """

    def choice(run: Run) -> str:
        if group != "position":
            return run.variant  # has the names of attention and parts
        target = run.settings.get(f"{group}._target_", UNSET).rpartition(".")[2]
        return run.choices.get(group, target)

    found = []
    for run in runs:
        alike = [other for other in runs if choice(other) == choice(run)]
        words = {group: choice(run)} if len(alike) < len(runs) else {}
        for key in keys:
            value, values = run.settings.get(key), {other.settings.get(key) for other in alike}
            absent = value is None or (value == "None" and None not in values)
            if not absent and len(values) > 1 and not key.endswith("_target_"):
                words[key] = str(value)
        found.append(words)
    return found


def _words_of_setting(key: str, run: Run) -> dict[str, str]:
    """Return the setting; nothing if its group, null or not, explains why it is missing."""
    related = (k for k in run.settings if k.startswith(f"{key}.") or key.startswith(f"{k}."))
    if key not in run.settings and any(related):
        return {}
    return {key: run.settings.get(key, UNSET)}


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
    words = setting_words(keys, rivals)
    shared = count_shared(rivals, keys)
    if len(words) > FEW and shared.count(max(shared)) == 1:
        origin = shared.index(max(shared))  # the row that all others start from
        words = {
            subject: [_change(own[origin], its, run) for its, run in zip(own, rivals, strict=True)]
            for subject, own in words.items()
        }
    found = []
    for i, run in enumerate(rivals):
        names = [_word(*pair) for own in words.values() for pair in own[i].items()]
        twins = [rival for rival in rivals if rival.settings == run.settings]
        found.append(names + ([f"code={run.code}"] if len(twins) > 1 else []))
    return found


def _change(ordinary: Mapping[str, str], own: Mapping[str, str], run: Run) -> dict[str, str]:
    """Return the run's words where they differ from the ordinary ones.

    Where `own` leaves out a null, that is the change.
    """
    if own == ordinary:
        return {}
    return {**own} or {key: run.settings[key] for key in ordinary if key in run.settings}


def _word(key: str, value: str) -> str:
    return f"{key}={value[:LONGEST]}"


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
    firsts = [members[0] for members in groups.values()]
    keys = sorted({k for run in firsts for k in run.settings if not k.startswith(OF_ATTENTION)})
    if any(run.match for run in firsts):
        keys = [key for key in keys if key not in (WIDTH, "match", "match_to")]
    words = setting_words([key for key in keys if varies(key, firsts)], firsts)
    lines = []
    for subject, own in words.items():
        by_row = dict(zip(groups, own, strict=True))
        if _is_named(subject, by_row, baseline):
            continue
        counts = count_values(
            [_value(subject, by_row[row]) for row, members in groups.items() for _ in members]
        )
        if subject == RATE and own_rates:
            lines.append(f"each variant has a learning rate of its own, lr: {counts}")
        else:
            lines.append(f"the variants differ in more than attention: {subject} ({counts})")
    return lines


def _is_named(subject: str, words: Mapping[str, Mapping[str, str]], baseline: str) -> bool:
    """Whether the rows' names have their words on the subject, except perhaps the baseline's."""
    null_group = f"{subject.rpartition('.')[0]}="  # names all that would be in the group
    named = {row: all(_word(*pair) in row for pair in own.items()) for row, own in words.items()}
    usual = None if named[baseline] else words[baseline]  # what changed rows do not have
    some = any(named[row] and (own or null_group in row) for row, own in words.items())
    return some and all(named[row] or own == usual for row, own in words.items())


def _value(subject: str, words: Mapping[str, str]) -> str:
    """Return the words without the subject's name: `rope base=500.0`; `unset` for no words."""
    short = [
        value if key == subject else f"{key.removeprefix(f'{subject}.')}={value}"
        for key, value in words.items()
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


def differences_in_provenance(runs: Sequence[Run]) -> list[str]:
    """Return one line for each difference in code or environment between the runs."""
    runs = list({run.folder: run for run in runs}.values())  # an extended run may occur twice
    lines = []
    unknown = sum(run.provenance is None for run in runs)
    if unknown:
        lines.append(f"the code of {_count_runs(unknown)} is unknown: it was not recorded")
    resumed = sum(bool(run.provenance and run.provenance.earlier) for run in runs)
    if resumed:
        lines.append(f"{_count_runs(resumed)} resumed with different code or schedule")
    versions = {pair for run in runs if run.provenance for pair in run.provenance.code.items()}
    modules = Counter(name for name, _ in versions)
    differing = sorted(name for name, count in modules.items() if count > 1)
    if differing:
        names = ", ".join(differing[:MAX_NAMES])
        names += f" and {len(differing) - MAX_NAMES} more" if len(differing) > MAX_NAMES else ""
        lines.append(f"the runs differ in code that affects results: {names}")
    # Sections warn of different threads themselves.
    for name, found in environments(runs):
        values = [_short(value) for value in found]
        if len(set(values)) > 1 and name not in ("platform", "threads"):
            lines.append(f"the runs differ in {name} ({count_values(values)})")
    return lines


def environments(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Return each recorded fact about the environment, with its value in each run."""
    return [
        (key.removeprefix("libraries."), [run.environment.get(key, "unknown") for run in runs])
        for key in sorted({key for run in runs for key in run.environment})
    ]


def _short(value: str) -> str:
    """Shorten a commit to twelve digits, and keep a `-dirty` mark."""
    commit, dash, dirty = value.partition("-dirty")
    return f"{commit[:12] if len(commit) == 40 else commit[:40]}{dash}{dirty}"


def _count_runs(count: int) -> str:
    return f"{count} run{'s' * (count > 1)}"
