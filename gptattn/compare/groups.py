"""Groups runs that differ only in the seed, names the groups, and picks the baseline."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from gptattn.compare.finished_runs import Run
from gptattn.compare.setting_words import (
    OF_ATTENTION,
    RATE,
    UNSET,
    WIDTH,
    counted,
    setting_words,
    varies,
    width_before,
)

Groups = dict[str, list[Run]]

# With more differences, rows are named by what was changed in the one that all others start from;
# with fewer, a name that says all is short enough.
FEW = 3


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
    groups: dict[tuple[tuple[str, str], ...], list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.finished):
        groups.setdefault(_made_of(run), []).append(run)
    mixed = not all(run.origin for run in runs)

    def name_of(run: Run) -> str:
        start = f" from {run.settings['init_from']}" if mixed and run.origin else ""
        return run.variant + start

    rivals: dict[str, list[Run]] = {}
    for members in groups.values():
        rivals.setdefault(name_of(members[0]), []).append(members[0])
    hidden = {RATE} if _own_rates([members[0] for members in groups.values()]) else set[str]()
    # In the order of the groups.
    said = {own: iter(_differing(firsts, hidden)) for own, firsts in rivals.items()}
    named: Groups = {}
    for members in groups.values():
        own = name_of(members[0])
        name = _unique_name(" ".join([own, *next(said[own])]), named)
        named[name] = sorted({run.seed: run for run in members}.values(), key=lambda run: run.seed)
    return named


def name_copies(runs: Sequence[Run], groups: Groups) -> list[str]:
    """Return a line for each of the runs that its group leaves out for a newer one of its seed."""
    counted = {(run.seed, *_made_of(run)): run for members in groups.values() for run in members}
    newest = [(run, counted[run.seed, *_made_of(run)]) for run in runs]
    return [
        f"{run.folder}: a copy of {other.folder.name}, which counts"
        for run, other in newest
        if run.folder != other.folder
    ]


def _made_of(run: Run) -> tuple[tuple[str, str], ...]:
    made = (run.variant, run.code, run.data.get("text_sha256", ""))
    return (*(("", part) for part in made), *sorted(run.settings.items()))


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


def _differing(rivals: Sequence[Run], hidden: Collection[str]) -> list[list[str]]:
    """Return for each run `key=value` of what tells it from the others, which share its name."""
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
    """Return these settings as the run has them: `setting_words` leaves out what is null."""
    return [(key, run.settings[key]) for key, _ in words if key in run.settings]


def _origin(keys: Collection[str], runs: Sequence[Run]) -> int | None:
    """Return which run shares most of these settings with the others; None if two do."""
    shared = _shared(runs, keys)
    most = max(shared)
    return shared.index(most) if shared.count(most) == 1 else None


def _unique_name(name: str, taken: Groups) -> str:
    """Return the name, numbered if taken: cut values can make two names equal."""
    count = 2
    unique = name
    while unique in taken:
        unique, count = f"{name} ({count})", count + 1
    return unique


def pick_baseline(groups: Groups, name: str | None) -> str | None:
    """Return the row called `name`, or the only row of the variant `name`; None without one.

    Without a name, return the row, of `mha` if there is one, whose settings most often equal those
    of the other rows, so that a row that was changed is held against one that was not;
    learning rates that each row has for itself do not count. Of equals, the one with the fewest
    words in its name, then the first in name order.
    """
    if name is None:
        mha = [row for row, members in groups.items() if members[0].variant == "mha"]
        firsts = [members[0] for members in groups.values()]
        keys = {key for run in firsts for key in run.settings}
        keys -= {RATE} if rates_differ(groups) else set()
        shared = dict(zip(groups, _shared(firsts, keys), strict=True))
        return min(mha or groups, key=lambda row: (-shared[row], len(row.split()), row))
    if name in groups:
        return name
    rows = [row for row, members in groups.items() if members[0].variant == name]
    return rows[0] if len(rows) == 1 else None


def _shared(runs: Sequence[Run], keys: Collection[str]) -> list[int]:
    """Return for each run in how many settings it is like a run, over all runs; also in lacks."""
    values = {key: Counter(run.settings.get(key) for run in runs) for key in keys}
    return [sum(values[key][run.settings.get(key)] for key in keys) for run in runs]


def differences_in_settings(groups: Groups, baseline: str) -> list[str]:
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
        if subject == RATE and rates_differ(groups):
            lines.append(f"each variant has a learning rate of its own, lr: {counted(found)}")
            continue
        lines.append(f"the variants differ in more than attention: {subject} ({counted(found)})")
    return lines


def _is_named(subject: str, words: Mapping[str, Sequence[tuple[str, str]]], baseline: str) -> bool:
    """Whether the rows' names tell their words on the subject, but for an untold baseline's."""
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
