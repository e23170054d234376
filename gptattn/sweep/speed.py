"""Measures the speeds that a report's rows lack, at the end of a sweep or with speed=true."""

import sys
from collections.abc import Sequence
from functools import partial

from gptattn.compare.comparison import Comparison
from gptattn.compare.speeds import are_narrow, list_measured
from gptattn.errors import UserError
from gptattn.runs.metrics import SPEED_RATIO
from gptattn.runs.speeds import add_speeds


def measure_rows(comparison: Comparison, allow_targets: Sequence[str] = ()) -> None:
    """Measure rows that lack speeds, in turns with their baseline; write these next to the runs.

    It prints its progress, and why a row is left out.
    """
    from gptattn.training.speed import measure_speeds, prepare  # slow to import

    for section in comparison.sections:
        base, *others = section.rows
        lacking = [row for row in others if SPEED_RATIO not in row.metrics]
        if list_measured(base.runs) and not lacking:
            continue
        found = {}
        for row in [base, *lacking]:
            try:
                found[row.name] = prepare(row.runs[-1].folder, allow_targets)
            except UserError as error:
                print(f"speeds left out for {row.name}: {error}", file=sys.stderr)
        if base.name not in found or (len(found) == 1 and list_measured(base.runs)):
            continue
        try:
            session = measure_speeds(found, partial(are_narrow, baseline=base.name))
            for folder in {row.runs[-1].folder.parent for row in section.rows if row.name in found}:
                add_speeds(folder, session)
        except Exception as error:  # memory, disk or a module: still write the report
            print(f"speeds left out: {type(error).__name__}: {error}", file=sys.stderr)
