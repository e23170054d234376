"""The attention track: one table of `experiment=track` runs and the shipped entries.

The file reads downwards: entries from runs or from files in benchmarks/track, rows with their
verdicts, then the table. `effective_compute.py` has the statistics, `plots.py` the figure.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import msgspec
import numpy as np

from gptattn.compare.curves import read_curves
from gptattn.compare.effective_compute import (
    MARGIN,
    NEGLIGIBLE,
    EffectiveCompute,
    Spread,
    difference_interval,
    fit_curve,
    judge,
    share_spread,
)
from gptattn.compare.finished_runs import Run
from gptattn.compare.rows import RATE, WIDTH
from gptattn.compare.statistics import Interval, t_interval
from gptattn.compare.table import Table
from gptattn.errors import DataError
from gptattn.machine.disk import write_json
from gptattn.machine.source_code import hash_of
from gptattn.runs.metrics import BITS, FLOPS, PARAMS
from gptattn.runs.overrides import ATTENTION

BASELINE = "mha"
BASELINE_SEEDS = range(1, 21)
MIN_BUDGETS = 3  # of the baseline, with 2 seeds or more
TRAIN_BASELINE = (
    "train the baseline with -m experiment=track_baseline, then -m experiment=track attn=mha "
    "'seed=range(1,21)', or follow the comments of experiment=track_gate"
)
# Of an entry: in the first stage, with the second stage, and at the gate.
SEEDS = (range(21, 24), range(21, 29), range(31, 39))
CONTEXTS = (256, 8_192)  # tokens at which the table gives the cache
POINTS = 100  # of a curve
# Settings that shipped entries keep: a fingerprint, of a narrow model on other text, misses these.
FACTS = (
    *("model.num_layers", "model.d_model", "model.context_length", "batch_size", "match"),
    *("trainer.precision", "text", "device"),
)
Ratio = tuple[float, Interval]
OWN = re.compile(rf"\+*({'|'.join(ATTENTION)})\b")  # what an entry can set
Given = TypeVar("Given", bound="StoredEntry")
# The bytes of a run's cache at each length: `runs.load.count_caches`, which imports torch.
CountCaches = Callable[[Path, Sequence[int]], list[int] | None]


class StoredEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Results of an attention, tied to hashes of the code or, once shipped, to a fingerprint."""

    name: str  # the overrides that make it
    # Module -> hash of each module that the result depends on; {} for a shipped entry.
    code: dict[str, str] = {}
    # By `training.fingerprint`, with the code that made the results; [] until the entry is shipped.
    fingerprint: list[float] = []
    version: int = 1  # of its mathematics
    stale: bool = False  # whether an earlier version made it

    @property
    def is_shipped(self) -> bool:
        """Whether it has a fingerprint instead of hashes of the code."""
        return bool(self.fingerprint)

    @property
    def typed(self) -> list[str]:
        """The overrides that make it, one by one."""
        first, *others = self.name.split()
        return [first if "=" in first else f"attn={first}", *others]

    def list_overrides(self, experiment: str) -> list[str]:
        """Return the overrides that compute its fingerprint in this experiment."""
        return [f"experiment={experiment}", *self.typed]


class Entry(StoredEntry, frozen=True, omit_defaults=True):
    """An attention trained for `steps` steps with the track's settings."""

    name: str  # the overrides that make it
    steps: int
    losses: dict[int, float]  # seed -> bits per byte of the held-out text
    flops: float  # of all training
    params: int
    caches: list[int] | None  # bytes of one row in half precision, at CONTEXTS; None: no cache
    rate: float
    # Settings that all entries share. Shipped ones have only FACTS: the fingerprint tests the rest.
    regime: dict[str, str]
    # (step, training loss in nats) of one of the runs; only people read it.
    curve: list[tuple[int, float]] = msgspec.field(default_factory=list)
    # Its training tokens/s over the baseline's, per round, by scripts/track_speeds.py.
    speeds: list[float] = msgspec.field(default_factory=list)
    machine: str = ""  # where they were measured

    @property
    def loss(self) -> float:
        """The mean loss over seeds."""
        return fmean(self.losses.values())

    def list_overrides(self, experiment: str) -> list[str]:
        budget = f"budget.steps={self.steps}"
        return [f"experiment={experiment}", budget, f"optim.lr={self.rate}", *self.typed]

    @property
    def is_baseline(self) -> bool:
        """Whether it is the baseline, with its own seeds."""
        return self.name == BASELINE and max(self.losses) in BASELINE_SEEDS


def read_entries(runs: Sequence[Run], count_caches: CountCaches) -> list[Entry]:
    """Return the entries that the runs make, one per name and number of steps, the newest first."""

    def key(name: str, run: Run) -> tuple[bool, int]:
        return name == BASELINE and run.seed in BASELINE_SEEDS, run.steps

    return [
        _make_entry(name, members, count_caches(members[0].folder, CONTEXTS))
        for name, members in group_runs(runs, key)
    ]


def group_runs(
    runs: Sequence[Run], key: Callable[[str, Run], Any] = lambda name, run: None
) -> list[tuple[str, list[Run]]]:
    """Group runs of the same attention, settings, code and `key`, by name, the newest first."""
    groups: dict[Any, list[Run]] = {}
    for run in sorted(runs, key=lambda run: -run.finished):
        name = name_entry(run.overrides)
        same = name, tuple(run.settings.items()), run.code, key(name, run)
        groups.setdefault(same, []).append(run)
    return [(name, members) for (name, *_), members in groups.items()]


def name_entry(typed: Sequence[str]) -> str:
    """Return the overrides that make the attention, in an order that does not depend on typing."""
    matches = [(one.lstrip("+").replace(" ", ""), m) for one in typed if (m := OWN.match(one))]
    # attn=gqa comes before attn.window=64.
    own = sorted(
        (ATTENTION.index(match[1]), one[len(match[1])] == ".", one) for one, match in matches
    )
    words = [one.removeprefix("attn=") for _, _, one in own]
    layers = tuple(f"{kind}=" for kind in ATTENTION[:4])
    if not any(one.startswith(layers) for _, _, one in own):
        words.insert(0, BASELINE)
    return " ".join(words)


def _make_entry(name: str, runs: Sequence[Run], caches: list[int] | None) -> Entry:
    first = runs[0]
    rows, length = (int(first.settings[key]) for key in ("batch_size", "model.context_length"))
    train = read_curves(first.folder)[0]["train"]
    train = train.iloc[:: max(1, math.ceil(len(train) / POINTS))]
    return Entry(
        name=name,
        steps=first.steps,
        losses={run.seed: run.metrics[BITS] for run in sorted(runs, key=lambda run: run.seed)},
        flops=first.metrics[FLOPS] * first.steps * rows * length,
        params=round(first.metrics[PARAMS]),
        caches=caches,
        rate=float(first.settings[RATE]),
        code={**first.provenance.code} if first.provenance else {"unknown": ""},
        regime=list_regime(first.settings),
        curve=[(int(row.step), round(row.loss, 4)) for row in train.itertuples()],
    )


def list_regime(settings: Mapping[str, str]) -> dict[str, str]:
    """Return those of a run's settings that all entries share."""
    own = (RATE, WIDTH, "budget")
    return {k: v for k, v in settings.items() if k not in own and not OWN.match(k)}


def read_shipped(folder: Path, kind: type[Given]) -> list[Given]:
    """Return the entries in a folder of JSON files. Raises DataError for a damaged file."""
    found: list[Given] = []
    for file in sorted(folder.glob("*.json")):
        try:
            found += msgspec.json.decode(file.read_bytes(), type=list[kind])
        except msgspec.MsgspecError as error:
            raise DataError(folder.name, f"{file} cannot be read: {error}") from error
    return found


def ship(entry: Given, fingerprint: Sequence[float], shipped: Iterable[Given]) -> Given:
    """Return a user's entry in its shipped form, to replace one of `shipped`."""
    version = max((one.version for one in shipped if one.name == entry.name), default=1)
    return msgspec.structs.replace(
        entry, code={}, fingerprint=[*fingerprint], version=version, stale=False
    )


def write_shipped(entries: Iterable[StoredEntry], folder: Path) -> None:
    """Write a file per name with all of its entries. Raises DiskError."""
    named: dict[str, list[StoredEntry]] = {}
    for entry in entries:
        if isinstance(entry, Entry):  # its fingerprint tests the other settings
            facts = {key: value for key, value in entry.regime.items() if key in FACTS}
            entry = msgspec.structs.replace(entry, regime=facts)
        named.setdefault(re.sub(r"[^\w.-]+", "_", entry.name).strip("_"), []).append(entry)
    for name, own in named.items():
        write_json(folder / f"{name}.json", own)


@dataclass(frozen=True)
class Row:
    """An entry compared with the baseline."""

    entry: Entry
    difference: float  # bits per byte
    interval: Interval
    spread: Spread  # its own, or shared with other rows
    effective: EffectiveCompute
    p: float  # of the effective compute, corrected
    verdict: str
    time: Ratio | None  # like `effective`, in seconds on one machine; None: unknown


@dataclass(frozen=True)
class Track:
    """The table: rows by effective compute, and the entries left out."""

    baseline: Mapping[int, Entry]  # by steps
    rows: Sequence[Row]
    left_out: Mapping[str, Sequence[str]]  # reason -> entries

    @property
    def entries(self) -> list[Entry]:
        """The entries that the table shows."""
        return [*self.baseline.values(), *(row.entry for row in self.rows)]

    @property
    def budgets(self) -> list[int]:
        """The steps of the rows; without rows, of the baseline."""
        return sorted({row.entry.steps for row in self.rows} or self.baseline)

    def label(self, entry: Entry) -> str:
        """Return a row's name, with its steps if rows differ in them."""
        several = len(self.budgets) > 1
        placebo = entry.name == BASELINE and not entry.is_baseline
        return entry.name + " (placebo)" * placebo + f" after {entry.steps:,} steps" * several


def make_track(
    own: Sequence[Entry],
    shipped: Sequence[Entry] = (),
    holds: Callable[[Entry], bool] = lambda entry: True,
) -> Track:
    """Return the table of the user's own entries and the shipped ones that can be compared.

    The baseline decides which can. It is the newest own one, with all budgets that match it,
    shipped ones included; if these are too few, an older one or the shipped one. Own entries, the
    newest first, come before shipped ones of the same name.

    `holds`: whether the installed code gives a shipped entry its fingerprint. It is only called
    where own entries, which must be of the installed code, are compared with it. Raises DataError
    without a baseline at enough budgets, or if its loss does not fall with them.
    """
    entries = [*own, *(entry for entry in shipped if not entry.stale)]
    baseline = _choose_baseline([entry for entry in entries if entry.is_baseline], holds)
    compared, left_out = _choose_entries(entries, baseline, holds)
    if stale := dict.fromkeys(entry.name for entry in shipped if entry.stale):
        left_out["its mathematics has changed since it was shipped"] = [*stale]
    steps = [*dict.fromkeys(entry.steps for entry in compared)]
    losses = [[*entry.losses.values()] for entry in compared]
    groups = [[*baseline[one].losses.values()] for one in steps] + losses
    shared = share_spread(groups) if compared else []
    beside, spreads = dict(zip(steps, shared, strict=False)), shared[len(steps) :]
    curve = fit_curve(
        {base.flops: [*base.losses.values()] for base in baseline.values()},
        {baseline[one].flops: spread.deviation for one, spread in beside.items()},
    )
    judged = judge(losses, [entry.flops for entry in compared], curve, spreads)
    rows: list[Row] = []
    for entry, finals, spread, effective, p, verdict in zip(
        compared, losses, spreads, *judged, strict=True
    ):
        base = baseline[entry.steps]
        difference = difference_interval(
            finals, [*base.losses.values()], spread, beside[entry.steps]
        )
        time = _effective_time(entry, base, effective)
        rows.append(Row(entry, *difference, spread, effective, p, verdict, time))
    rows.sort(key=lambda row: (-row.effective.value, row.entry.loss))
    return Track(dict(sorted(baseline.items())), rows, left_out)


def _choose_baseline(bases: Sequence[Entry], holds: Callable[[Entry], bool]) -> dict[int, Entry]:
    """Return the baseline by steps: the first with enough budgets, and all budgets that match it.

    Of several with the same steps, the one with the most seeds counts.
    """
    for reference in bases:
        found: dict[int, Entry] = {}
        for entry in sorted(bases, key=lambda entry: -len(entry.losses)):
            if len(entry.losses) > 1 and not _describe_mismatch(entry, [reference], holds):
                found.setdefault(entry.steps, entry)
        if len(found) >= MIN_BUDGETS:
            return found
    needed = f"the baseline needs {MIN_BUDGETS} or more budgets with 2 seeds each"
    raise DataError("track", f"{needed}; {TRAIN_BASELINE}")


def _choose_entries(
    entries: Sequence[Entry], baseline: Mapping[int, Entry], holds: Callable[[Entry], bool]
) -> tuple[list[Entry], dict[str, list[str]]]:
    """Return the entries to compare, and the names of the others by reason."""
    left_out: dict[str, list[str]] = {}
    bases = [*baseline.values()]
    hint = f"; {TRAIN_BASELINE}" if all(entry.is_shipped for entry in bases) else ""
    compared: dict[tuple[bool, str, int], Entry] = {}
    begun: set[tuple[bool, str, int]] = set()  # own entries; some may still lack seeds
    for entry in entries:
        own = not entry.is_shipped
        key = entry.is_baseline, entry.name, entry.steps
        if entry in bases or (not own and key in compared):
            continue
        newer = [one for one in compared.values() if not one.is_shipped]
        if own and key in begun:
            why = "a newer one has the same name"
        elif why := _describe_mismatch(entry, bases, holds):
            why += hint if own and not entry.is_baseline else ""
        elif entry.is_baseline:
            why = "it has one seed, or another result has more seeds or is newer" if own else ""
        elif not (why := _describe_mismatch(entry, newer, holds)):
            begun.add(key)
            why = _describe_seeds(entry)
            if entry.steps not in baseline:
                why = f"the baseline was not trained for {entry.steps:,} steps"
        if why:
            steps = f" at {entry.steps:,} steps" if entry.is_baseline else ""
            left_out.setdefault(why, []).append(entry.name + steps)
        elif not entry.is_baseline:
            compared[key] = entry
    return [*compared.values()], left_out


def _describe_mismatch(entry: Entry, bases: Sequence[Entry], holds: Callable[[Entry], bool]) -> str:
    """Return why an entry cannot be compared with these; "" if it can."""
    for one in bases:
        changed = sorted({k for k, _ in one.regime.items() ^ entry.regime.items()})
        if "text" in changed:
            return "trained on a different text"
        if changed:
            return f"different settings ({', '.join(changed[:3])})"
        if entry.is_shipped and one.is_shipped:
            continue
        shipped, own = (entry, one) if entry.is_shipped else (one, entry)
        # Own entries must share one code; to be compared with a shipped one, the installed code.
        expected = {m: hash_of(m) for m in own.code} if shipped.is_shipped else shipped.code
        code = [m for m, digest in own.code.items() if expected.get(m, digest) != digest]
        if code:
            return f"different code ({', '.join(code[:3])})"
        if shipped.is_shipped and not holds(shipped):
            return f"{shipped.name} no longer gives the shipped losses with this code"
    return ""


def _describe_seeds(entry: Entry) -> str:
    """Return why an entry's seeds cannot be used; "" if they can."""
    seeds = sorted(entry.losses)
    if any(seeds == [*allowed] for allowed in SEEDS):
        return ""
    needed = " or ".join(f"{allowed[0]} to {allowed[-1]}" for allowed in SEEDS)
    return f"has seeds {', '.join(map(str, seeds))}; an entry needs {needed} (docs/track_rules.md)"


def _effective_time(entry: Entry, base: Entry, effective: EffectiveCompute) -> Ratio | None:
    """Return the effective compute times the ratio of FLOPs per second, with both errors."""
    interval = t_interval(np.log(entry.speeds))
    if interval is None:
        return None
    value, centre = effective.value, fmean(interval)
    scale = entry.flops / base.flops * math.exp(centre)

    def widen(end: float) -> float:
        if not (0 < end < math.inf and 0 < value < math.inf):
            return end
        half = math.hypot(math.log(end / value), interval[1] - centre)
        return value * math.exp(math.copysign(half, end - value))

    low, high = effective.interval
    return value * scale, (widen(low) * scale, widen(high) * scale)


def track_table(track: Track) -> Table:
    """Return the table: the baseline's row, the others, and notes on how to read them."""
    bases = [track.baseline[steps] for steps in track.budgets]
    lines = [(track.label(base), base, ("", "1", "", "the baseline", "1")) for base in bases]
    for row in track.rows:
        low, high = row.interval
        compared = (
            f"{row.difference:+.4f} ± {(high - low) / 2:.4f}",
            _ratio_words((row.effective.value, row.effective.interval)),
            "<0.001" if row.p < 0.001 else f"{row.p:.3f}",
            row.verdict,
            "" if row.time is None else _ratio_words(row.time),
        )
        name = track.label(row.entry) + " *" * (not row.entry.is_shipped)
        lines.append((name, row.entry, compared))
    words = ["entry", "n", "lr", "bits/byte", "difference", "effective compute", "p", "verdict"]
    cells = [[*words, "time", *(f"cache, {one:,}" for one in CONTEXTS), "params"]]
    for label, entry, compared in lines:
        first = [label, f"{len(entry.losses)}", f"{entry.rate:g}", f"{entry.loss:.4f}"]
        caches = [f"{one:,}" for one in entry.caches or ()] or ["no cache"] * len(CONTEXTS)
        cells.append([*first, *compared, *caches, f"{entry.params:,}"])
    return Table("The attention track", cells, notes=_list_notes(track))


def _ratio_words(ratio: Ratio) -> str:
    def shown(value: float) -> str:
        return "below" if value == 0 else "above" if value == float("inf") else f"{value:.2f}"

    value, low, high = map(shown, (ratio[0], *ratio[1]))
    return value if value == low == high else f"{value} ({low} to {high})"


def _list_notes(track: Track) -> list[str]:
    """Return notes on how to read the table and what it lacks."""
    steps = ", ".join(
        f"{one.steps:,} steps ({len(one.losses)} seeds, {one.loss:.4f})"
        for one in track.baseline.values()
    )
    first = f"the baseline, {BASELINE} (placebo: the same with other seeds), at {steps}"
    last = [f"left out: {', '.join(names)}: {why}" for why, names in track.left_out.items()]
    if not track.rows:
        return [first, *last]
    apart = [row.entry.name for row in track.rows if row.spread.degrees < len(row.entry.losses)]
    times = [
        "time: the baseline's time to the same loss divided by the entry's, measured on "
        f"{machine} by scripts/track_speeds.py; no verdict depends on it"
        for machine in dict.fromkeys(r.entry.machine for r in track.rows if r.time is not None)
    ]
    return [
        first,
        "difference: bits per byte minus the baseline's, ± half of its 95% interval",
        "effective compute: the compute the baseline would need for the same loss, divided by the "
        "entry's, with its 95% interval; above, below: outside the baseline's budgets",
        f"p: null hypothesis: effective compute within {NEGLIGIBLE - 1:.0%} of 1; corrected over "
        f"the rows (Holm); equivalent: within {MARGIN - 1:.0%} (docs/track_rules.md)",
        *([f"rows with their own standard deviation: {', '.join(apart)}"] * bool(apart)),
        *times,
        f"cache: bytes for one row in half precision, after {CONTEXTS[0]:,} and {CONTEXTS[1]:,} "
        "tokens; lr: the learning rate of its runs; *: trained here (all others are shipped)",
        *last,
    ]
