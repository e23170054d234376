"""What runs differ in, in words: a config file where that explains it, otherwise the settings."""

from collections import Counter
from collections.abc import Sequence

from gptattn.compare.finished_runs import Run
from gptattn.model.kinds import default_width
from gptattn.settings.config import OF_BLOCK

# Beginnings of settings' names: what a variant's name stands for, and what a block's file sets.
OF_ATTENTION = ("attn.", "part.", "pattern")
OF_GROUP = {"attn": OF_ATTENTION, "block": OF_BLOCK}
# Groups whose files have settings of their own: one file need not know those of another.
OPEN = ("attn", "part", "position")
RATE = "optim.lr"
WIDTH = "model.d_mlp"
UNSET = "unset"  # a run without the setting; `none` and `None` are values

# Group or setting -> the (name, value) pairs that tell a run by it.
Words = dict[str, list[tuple[str, str]]]


def setting_words(keys: Sequence[str], run: Run, runs: Sequence[Run]) -> Words:
    """Return the pairs that tell the run from the others, by group or setting.

    `keys` are the settings that vary between the runs, of which the run is one.
    """
    chosen, rest = by_choice(keys, runs)
    words = {group: [(group, run.choices.get(group, UNSET))] for group in chosen}
    for group in OPEN:
        own = [key for key in rest if f"{key}.".startswith(f"{group}.")]
        if own:
            words[group] = _open_words(group, own, run, runs)
            rest = [key for key in rest if key not in own]
    return words | {key: _word(key, run) for key in rest}


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


def _word(key: str, run: Run) -> list[tuple[str, str]]:
    """Return the setting; nothing for what is missing because its group is null, or is not."""
    value = run.settings.get(key)
    related = (k for k in run.settings if k.startswith(f"{key}.") or key.startswith(f"{k}."))
    if value is None and any(related):
        return []
    return [(key, UNSET if value is None else value)]


def varies(key: str, runs: Sequence[Run]) -> bool:
    """Whether the runs differ in this setting."""
    return len({run.settings.get(key) for run in runs}) > 1


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


def counted(values: Sequence[str]) -> str:
    """Count equal values: `1000 steps: 12 runs; 2000 steps: 3 runs`, the most frequent first."""
    most = Counter(values).most_common()
    shown = [f"{value}: {count} run{'s' * (count > 1)}" for value, count in most[:5]]
    return "; ".join(shown) + (f"; and {len(most) - 5} more" if len(most) > 5 else "")
