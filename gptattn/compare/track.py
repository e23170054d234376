"""The attention track: runs of `experiment=track` beside the shipped entries, as one table.

The file reads downwards: an entry, from runs or from a file in benchmarks/track; the rows with
their verdicts; the table. `statistics.py` has the statistics, `plots.py` the figure.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import msgspec

from gptattn.compare.curves import read_curves
from gptattn.compare.finished_runs import Run
from gptattn.compare.setting_differences import RATE, WIDTH
from gptattn.compare.statistics import (
    LOOKS,
    MIN_BUDGETS,
    Effective,
    Interval,
    correct_holm,
    decide,
    difference_interval,
    effective_compute,
    fit_curve,
    share_spread,
)
from gptattn.errors import DataError
from gptattn.machine.disk import write_atomically
from gptattn.runs.folder import RunFolder
from gptattn.runs.metrics import BITS, FLOPS, PARAMS, SPEED

BASELINE = "mha"
BASELINE_SEEDS = range(1, 21)
CONTEXTS = (256, 8_192)  # tokens for which the cache is given
POINTS = 100  # of a curve
Ratio = tuple[float, Interval]
OWN = re.compile(r"\+*(attn|recipe|part|pattern|layers|position)\b")  # what an entry may set


class Entry(msgspec.Struct, frozen=True):
    """An attention in the track's regime, trained for so many steps."""

    name: str  # the overrides that make it
    steps: int
    losses: dict[int, float]  # seed -> bits per byte of the held-out text
    flops: float  # of the whole training
    params: int
    caches: list[int]  # bytes of one row in half precision, at CONTEXTS
    rate: float
    speed: float | None  # training tokens/s; None: other runs shared the machine
    machine: str
    code: dict[str, str]  # module -> hash, of those that the result depends on
    regime: dict[str, str]  # the settings that all entries share
    curve: list[tuple[int, float]] = []  # (step, training loss in nats) of the first seed

    @property
    def loss(self) -> float:
        """The mean loss over seeds."""
        return fmean(self.losses.values())

    @property
    def label(self) -> str:
        """Its name in the table, where the baseline's attention at other seeds is a placebo."""
        return self.name + " (placebo)" * (self.name == BASELINE and not self.is_baseline)

    @property
    def is_baseline(self) -> bool:
        """Whether it is the baseline, with its own seeds."""
        return self.name == BASELINE and max(self.losses) in BASELINE_SEEDS


def read_entries(
    runs: Sequence[Run], count_caches: Callable[[Path, Sequence[int]], list[int]]
) -> list[Entry]:
    """Return the entries that the runs make, the newest first.

    Runs of one entry have the same attention, steps, settings and code.

    `count_caches`: the bytes of a run's cache at each length, as `runs.load` counts them, which
    imports torch. Raises OSError and ValueError if the settings of a run cannot be read.
    """
    groups: dict[Any, list[Run]] = {}
    for run in sorted(runs, key=lambda run: -run.finished):
        typed = RunFolder(run.folder).read_settings()["overrides"]
        name = " ".join(o.removeprefix("attn=") for o in typed if OWN.match(o)) or BASELINE
        of_baseline = name == BASELINE and run.seed in BASELINE_SEEDS
        key = name, of_baseline, run.steps, tuple(run.settings.items()), run.code
        groups.setdefault(key, []).append(run)
    return [
        _make_entry(name, members, count_caches(members[0].folder, CONTEXTS))
        for (name, *_), members in groups.items()
    ]


def _make_entry(name: str, runs: Sequence[Run], caches: list[int]) -> Entry:
    first = runs[0]
    rows, length = (int(first.settings[key]) for key in ("batch_size", "model.context_length"))
    speeds = [run.metrics[SPEED] for run in runs if SPEED in run.metrics]
    train = read_curves(first.folder)[0].train
    train = train.iloc[:: max(1, math.ceil(len(train) / POINTS))]
    return Entry(
        name=name,
        steps=first.steps,
        losses={run.seed: run.metrics[BITS] for run in sorted(runs, key=lambda run: run.seed)},
        flops=first.metrics[FLOPS] * first.steps * rows * length,
        params=round(first.metrics[PARAMS]),
        caches=caches,
        rate=float(first.settings[RATE]),
        speed=median(speeds) if len(speeds) == len(runs) else None,
        machine=first.environment.get("device", "?"),
        code={**first.provenance.code} if first.provenance else {},
        regime={
            key: value
            for key, value in first.settings.items()
            if key not in (RATE, WIDTH, "budget") and not OWN.match(key)
        },
        curve=[(int(row.step), round(row.loss, 4)) for row in train.itertuples()],
    )


def read_shipped(folder: Path) -> list[Entry]:
    """Return the entries in a folder of JSON files. Raises DataError for one that is damaged."""
    found = []
    for file in sorted(folder.glob("*.json")):
        try:
            found += msgspec.json.decode(file.read_bytes(), type=list[Entry])
        except msgspec.MsgspecError as error:
            raise DataError("track", f"{file} cannot be read: {error}") from error
    return found


def write_shipped(entries: Iterable[Entry], folder: Path) -> None:
    """Write each entry's file, with all of its budgets. Raises DiskError."""
    named: dict[str, list[Entry]] = {}
    for entry in entries:
        named.setdefault(re.sub(r"[^\w.-]+", "_", entry.name).strip("_"), []).append(entry)
    folder.mkdir(parents=True, exist_ok=True)
    for name, own in named.items():
        data = msgspec.json.format(msgspec.json.encode(own), indent=1) + b"\n"
        write_atomically(folder / f"{name}.json", lambda file, data=data: file.write(data))


@dataclass(frozen=True)
class Row:
    """An entry beside the baseline."""

    entry: Entry
    shipped: bool
    difference: float  # bits per byte
    interval: Interval
    effective: Effective
    p: float  # of the effective compute, corrected
    verdict: str
    time: Ratio | None  # as `effective`, in seconds on one machine; None: not known


@dataclass(frozen=True)
class Track:
    """The table: rows by effective compute, and what was left out, by name."""

    baseline: Mapping[int, Entry]  # by steps
    rows: Sequence[Row]
    own_spread: Sequence[str]  # rows whose standard deviation is their own
    left_out: Mapping[str, Sequence[str]]  # reason -> entries


def make_track(own: Sequence[Entry], shipped: Sequence[Entry] = ()) -> Track:
    """Return the table of these entries and the shipped ones, as far as they can be compared.

    Own entries take the place of shipped ones of the same name once they have all their seeds, and
    decide what can be compared, those of the baseline first. Raises DataError without a baseline at
    enough budgets, and says why if the shipped one cannot be used.
    """
    kept: dict[tuple[str, int, bool], tuple[Entry, bool]] = {}
    begun: set[tuple[str, int, bool]] = set()  # own entries that still lack seeds
    left_out: dict[str, list[str]] = {}
    unlike = ""  # why the shipped baseline cannot be used
    for entries, is_shipped in ((own, False), (shipped, True)):
        for entry in sorted(entries, key=lambda entry: not entry.is_baseline):
            key = entry.name, entry.steps, entry.is_baseline
            if key in kept or (key in begun and not is_shipped):
                if not is_shipped:
                    left_out.setdefault("a newer one has its name", []).append(entry.name)
                elif (
                    entry.is_baseline
                    and len(entry.losses) > len(kept[key][0].losses)
                    and not _describe_mismatch(entry, [one for one, _ in kept.values()])
                ):
                    why = "the shipped baseline has more seeds"
                    left_out.setdefault(why, []).append(f"{entry.name} at {entry.steps:,} steps")
                    kept[key] = entry, True
                continue
            why = _describe_mismatch(entry, [one for one, _ in kept.values()])
            if not why and (why := _describe_seeds(entry)):
                begun.add(key)
            if not why:
                kept[key] = entry, is_shipped
                continue
            if is_shipped and entry.is_baseline:
                unlike = why
            name = f"{entry.name} at {entry.steps:,} steps" if entry.is_baseline else entry.name
            left_out.setdefault(why, []).append(name)
    baseline = {entry.steps: entry for entry, _ in kept.values() if entry.is_baseline}
    if unlike and len(baseline) < MIN_BUDGETS:
        yours = "train yours with experiment=track_baseline"
        raise DataError("track", f"the shipped baseline cannot be used ({unlike}); {yours}")
    curve = fit_curve({one.flops: [*one.losses.values()] for one in baseline.values()})
    compared: list[tuple[Entry, bool]] = []
    for entry, is_shipped in kept.values():
        if entry.is_baseline:
            continue
        if entry.steps not in baseline:
            why = f"the baseline has no {entry.steps:,} steps"
            left_out.setdefault(why, []).append(entry.name)
        else:
            compared.append((entry, is_shipped))
    beside = {entry.steps: baseline[entry.steps] for entry, _ in compared}
    groups = [[*one.losses.values()] for one in (*beside.values(), *(e for e, _ in compared))]
    spreads = share_spread(groups)[len(beside) :] if compared else []

    found: list[Effective] = []
    differences: list[tuple[float, Interval]] = []
    shares = [LOOKS[len(entry.losses)] for entry, _ in compared]
    for (entry, _), spread, share in zip(compared, spreads, shares, strict=True):
        losses, base = [*entry.losses.values()], [*baseline[entry.steps].losses.values()]
        found.append(effective_compute(losses, entry.flops, curve, spread, share))
        differences.append(difference_interval(losses, base, spread))
    corrected = correct_holm([one.p for one in found], shares)
    rows = [
        Row(
            entry,
            is_shipped,
            *difference,
            effective,
            p,
            decide(p, effective),
            _effective_time(entry, baseline[entry.steps], effective),
        )
        for (entry, is_shipped), difference, effective, p in zip(
            compared, differences, found, corrected, strict=True
        )
    ]
    most = max((spread.degrees for spread in spreads), default=0)
    own_spread = [
        e.name for (e, _), one in zip(compared, spreads, strict=True) if one.degrees < most
    ]
    rows.sort(key=lambda row: -row.effective.value)
    return Track(dict(sorted(baseline.items())), rows, own_spread, left_out)


def _describe_mismatch(entry: Entry, known: Sequence[Entry]) -> str:
    """Return why an entry cannot be compared with these; "" if it can."""
    for one in known:
        changed = sorted({k for k, _ in one.regime.items() ^ entry.regime.items()})
        if "text" in changed:
            return "another text"
        if changed:
            return f"other settings ({', '.join(changed[:3])})"
        code = [m for m, digest in entry.code.items() if one.code.get(m, digest) != digest]
        if code:
            return f"other code ({', '.join(code[:3])})"
    return ""


def _describe_seeds(entry: Entry) -> str:
    """Return why an entry's number of seeds cannot be used; "" if it can."""
    n, (first, second) = len(entry.losses), LOOKS
    if entry.is_baseline or n in LOOKS:
        return ""
    seeds = f"{n} seed{'s' * (n > 1)}"
    return f"{seeds}; an entry has {first} seeds, or {second} after the second stage"


def _effective_time(entry: Entry, base: Entry, effective: Effective) -> Ratio | None:
    if entry.speed is None or base.speed is None or entry.machine != base.machine:
        return None
    scale = entry.flops / base.flops * entry.speed / base.speed
    low, high = effective.interval
    return effective.value * scale, (low * scale, high * scale)


HEADINGS = (
    *("entry", "n", "lr", "bits/byte", "difference", "effective compute", "p", "verdict"),
    *("time", "cache, 256", "cache, 8,192", "params"),
)


def list_cells(track: Track) -> list[list[str]]:
    """Return the table's cells, its heading first, then the baseline's row, and then the rest."""
    cells = [[*HEADINGS]]
    entries = {row.entry.steps for row in track.rows} or {*track.baseline}
    for steps in sorted(entries):
        base = track.baseline[steps]
        cells.append([*_first_cells(base), "", "1", "", "the baseline", "1", *_last_cells(base)])
    for row in track.rows:
        low, high = row.interval
        name, *first = _first_cells(row.entry)
        cells.append(
            [
                name + " *" * (not row.shipped),
                *first,
                f"{row.difference:+.4f} ± {(high - low) / 2:.4f}",
                _ratio_words((row.effective.value, row.effective.interval)),
                "<0.001" if row.p < 0.001 else f"{row.p:.3f}",
                row.verdict,
                "" if row.time is None else _ratio_words(row.time),
                *_last_cells(row.entry),
            ]
        )
    return cells


def _first_cells(entry: Entry) -> list[str]:
    return [entry.label, f"{len(entry.losses)}", f"{entry.rate:g}", f"{entry.loss:.4f}"]


def _last_cells(entry: Entry) -> list[str]:
    return [*(f"{held:,}" for held in entry.caches), f"{entry.params:,}"]


def _ratio_words(ratio: Ratio) -> str:
    def shown(value: float) -> str:
        return "below" if value == 0 else "above" if value == float("inf") else f"{value:.2f}"

    value, low, high = map(shown, (ratio[0], *ratio[1]))
    return value if value == low == high else f"{value} ({low} to {high})"


def list_notes(track: Track) -> list[str]:
    """Return lines that say how to read the table, and what it lacks."""
    steps = ", ".join(
        f"{one.steps:,} steps ({len(one.losses)} seeds, {one.loss:.4f})"
        for one in track.baseline.values()
    )
    count = f"{len(track.rows)} entr{'y' if len(track.rows) == 1 else 'ies'}"
    apart = f", but for {', '.join(track.own_spread)}" if track.own_spread else ""
    first = f"the baseline, {BASELINE}, at {steps}"
    last = [f"left out: {', '.join(names)}: {why}" for why, names in track.left_out.items()]
    if not track.rows:
        return [first, *last]
    return [
        first,
        "difference: bits per byte less the baseline's, ± half of its 95% interval",
        "effective compute: what the baseline would need for the same loss, over what the entry "
        "used, with its 95% interval; above and below: outside the baseline's budgets",
        f"p: that the effective compute is within 1% of 1, corrected over {count} (Holm) and "
        f"two looks; all rows share one standard deviation over seeds{apart} (Levene's test)",
        "equivalent: within 5% of the compute, by two tests at 5%, of each row alone; a row with "
        + " and with ".join(
            f"{n} seeds may err in {share:.0%} of it" for n, share in LOOKS.items()
        ),
        *(
            f"time: the baseline's time to the same loss over the entry's, on {machine}; no "
            "verdict depends on it"
            for machine in dict.fromkeys(r.entry.machine for r in track.rows if r.time is not None)
        ),
        "* trained here; the others are shipped",
        *last,
    ]
