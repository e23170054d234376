"""Describes how runs differ beyond what is compared: in settings, code and environment."""

from collections import Counter
from collections.abc import Mapping, Sequence

from gptattn.compare.finished_runs import Run
from gptattn.compare.rows import RATE, WIDTH
from gptattn.runs.overrides import ATTENTION
from gptattn.settings.config import OF_BLOCK

LISTED = 6  # names that one sentence lists


def listed(items: Sequence[str]) -> str:
    """Join names with commas and `and`; for more than seven, six names and a count."""
    if len(items) > LISTED + 1:
        items = [*items[:LISTED], f"{len(items) - LISTED} more"]
    *start, last = items
    return f"{', '.join(start)} and {last}" if start else last


def differences_in_settings(
    groups: Mapping[str, Sequence[Run]], baseline: str, by: Sequence[str], *, own_rates: bool
) -> list[str]:
    """Return a line on the other settings in which rows of another attention differ.

    Settings that one config file explains are named by its group. Rows with the baseline's
    attention are left out, because their differences are what they compare. So are settings in
    `by`, widths that `match` chose, and with `own_rates` the learning rate, which is a column.
    """

    def attention(run: Run) -> list[object]:
        own = [(k, v) for k, v in run.settings.items() if k.startswith(ATTENTION)]
        return [run.variant, *sorted(own)]

    firsts = [members[0] for members in groups.values()]
    base = groups[baseline][0]
    others = [run for run in firsts if attention(run) != attention(base)]
    chosen = (WIDTH, "match", "match_to") if any(run.match for run in firsts) else ()
    left_out = (*ATTENTION, *by, *chosen, *[RATE] * own_rates)
    keys = sorted({key for run in firsts for key in run.settings if not key.startswith(left_out)})
    keys = [k for k in keys if any(run.settings.get(k) != base.settings.get(k) for run in others)]
    named = ", ".join(dict.fromkeys(_subject(key, firsts) for key in keys))
    return [f"the variants differ in more than attention: {named}"] if named else []


def _subject(key: str, runs: Sequence[Run]) -> str:
    """Return the setting's config group if the runs use different files of it, else the setting."""
    group = "block" if key.startswith(OF_BLOCK) else key.partition(".")[0]
    return group if len({run.choices.get(group) for run in runs}) > 1 else key


def count_values(values: Sequence[str]) -> str:
    """Count equal values, most frequent first: `1000 steps: 12 runs; 2000 steps: 3 runs`."""
    most = Counter(values).most_common()
    shown = [f"{value}: {count} run{'s' * (count > 1)}" for value, count in most[:5]]
    return "; ".join(shown) + (f"; and {len(most) - 5} more" if len(most) > 5 else "")


def differences_in_provenance(runs: Sequence[Run]) -> list[str]:
    """Return a line for each difference in code or environment between the runs."""
    lines = []
    unknown = sum(run.provenance is None for run in runs)
    if unknown:
        lines.append(f"{_count_runs(unknown)} did not record the code, so it is unknown")
    resumed = sum(bool(run.provenance and run.provenance.earlier) for run in runs)
    if resumed:
        lines.append(f"{_count_runs(resumed)} resumed with different code or another schedule")
    versions = {pair for run in runs if run.provenance for pair in run.provenance.code.items()}
    modules = Counter(name for name, _ in versions)
    differing = sorted(name for name, count in modules.items() if count > 1)
    if differing:
        lines.append(f"the runs differ in code that affects results: {listed(differing)}")
    for name, values in environments(runs):
        if len(set(values)) > 1 and name != "platform":
            lines.append(f"the runs differ in {name} ({count_values(values)})")
    return lines


def environments(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Return each recorded fact about the environment with its value in each run."""
    return [
        (key.removeprefix("libraries."), [run.environment.get(key, "unknown") for run in runs])
        for key in sorted({key for run in runs for key in run.environment})
    ]


def _count_runs(count: int) -> str:
    return f"{count} run{'s' * (count > 1)}"
