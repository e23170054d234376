"""Compares two sections that differ in one setting: does it change what the variants show?

The question has two families of comparisons: does a variant's loss change, and does its difference
to the baseline change (the interaction of variant and setting)? A variant can gain by the setting
and still lose against the baseline, which gained more. Between tokenizers the loss is that in bits
per byte, of the same held-out bytes.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

import numpy as np

from gptattn.compare.finished_runs import Run
from gptattn.compare.groups import Groups
from gptattn.compare.paired import Paired, family, paired, second_minus_first
from gptattn.compare.results import Across, Change
from gptattn.compare.sections import HELD_AGAINST, MATRICES, RunSet
from gptattn.compare.setting_words import OF_BLOCK, OPEN, WIDTH

# Beginnings of the settings that an axis stands for.
OWN = {
    "block": OF_BLOCK,
    "precision": ("trainer.precision",),
    "optim": (MATRICES,),
    "tokenizer": ("tokenizer.",),
}
BITS = "val/bits_per_byte"

Compared = tuple[RunSet, Groups, str]  # the runs of a section, its rows, its baseline


def compare_across(sections: Sequence[Compared]) -> list[Across]:
    """Return one Across per two sections that can be held against each other.

    They differ in one of HELD_AGAINST alone, have one baseline, and share another row. Between
    tokenizers the baseline is enough: no section has both.
    """
    found = [_across(first, second) for first, second in combinations(sections, 2)]
    return [across for across in found if across is not None]


def _across(first: Compared, second: Compared) -> Across | None:
    (one, before, baseline), (other, after, its_baseline) = first, second
    axes = [axis for axis, part in one.parts.items() if part != other.parts[axis]]
    if len(axes) != 1 or axes[0] not in HELD_AGAINST or baseline != its_baseline:
        return None
    (axis,) = axes
    tokenizers = axis == "tokenizer"
    if tokenizers and not all("val_bytes" in run.data for run in (*one.runs, *other.runs)):
        return None
    metric = BITS if tokenizers else "val/loss"
    # The baseline first, then by loss, as in the first section.
    shared = sorted(
        (name for name in before if name in after),
        key=lambda name: (name != baseline, paired([before[name]], metric).values.mean(), name),
    )
    title, its_title = (found.parts[axis] or f"another {axis}" for found in (one, other))
    losses = {name: paired([before[name], after[name]], metric) for name in shared}
    gaps = {
        name: paired(
            [groups[row] for groups in (before, after) for row in (name, baseline)], metric
        ).of(_gaps)
        for name in shared
        if name != baseline
    }
    changes, changed = _changes(losses, title), _changes(gaps, baseline)
    if not (changes if tokenizers else changed):
        return None
    return Across(
        axis,
        ", ".join(part for key, part in one.parts.items() if part and key != axis),
        title,
        its_title,
        baseline,
        changes,
        changed,
        _others(axis, [(before[name][0].settings, after[name][0].settings) for name in shared]),
        metric,
        _token_bytes(before[baseline][0], after[baseline][0]) if tokenizers else None,
    )


def _token_bytes(*runs: Run) -> tuple[float, float] | None:
    """Return the bytes that a held-out token of each of two runs stands for; None if unknown."""
    bits = [run.metrics["val/loss"] / math.log(2) for run in runs]
    per_byte = [run.metrics.get(BITS, 0.0) for run in runs]
    if not all(per_byte):
        return None
    first, second = (a / b for a, b in zip(bits, per_byte, strict=True))
    return first, second


def _gaps(losses: np.ndarray) -> np.ndarray:
    """Return the row's losses minus the baseline's: [4, n] -> [2, n]."""
    return losses[0::2] - losses[1::2]


def _changes(found: Mapping[str, Paired], reference: str) -> dict[str, Change]:
    """Return the changes from the first to the second of each row's values [2, n]."""
    pairs = {(reference, name): own.of(second_minus_first) for name, own in found.items()}
    means = {name: own.values.mean(axis=1) for name, own in found.items() if own.values.size}
    return {
        d.variant: Change(float(means[d.variant][0]), float(means[d.variant][1]), d)
        for d in family(pairs)
    }


def _others(axis: str, rows: Iterable[tuple[Mapping[str, str], Mapping[str, str]]]) -> list[str]:
    """Return what else differs in the two settings of a row: a group with files, or a setting."""
    found = set()
    for before, after in rows:
        keys = {key for key in {*before, *after} if before.get(key) != after.get(key)}
        # Sections agree in the width, but for what `match` chose.
        found |= {key for key in keys if key != WIDTH and not key.startswith(OWN[axis])}
    return sorted({key.split(".")[0] if key.startswith(OPEN) else key for key in found})
