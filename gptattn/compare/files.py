"""Makes comparison.csv and comparison.json, and writes every file of the report."""

import csv
import io
import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gptattn.compare import ladder_words
from gptattn.compare.across_words import sentences
from gptattn.compare.evaluations import cache_costs, position_losses
from gptattn.compare.ladder import LadderReport, Scaled
from gptattn.compare.results import METRICS, OF_DATA, Across, Change, Comparison, Row, Section
from gptattn.compare.verdicts import match_words, section_words, sure_words
from gptattn.errors import DiskError
from gptattn.machine.disk import write_atomically

BOARD_MARK = ".gptattn-compare"  # suffix of the event files that we write and may remove
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")


def write(file: Path, content: str | bytes) -> None:
    """Write the file atomically. Its folder must exist."""
    data = content.encode("utf-8", errors="replace") if isinstance(content, str) else content
    write_atomically(file, lambda target: target.write(data))


@contextmanager
def disk_errors(folder: Path, option: str = "--out") -> Iterator[None]:
    """Turn an OSError into a DiskError that names `option` and `folder`."""
    try:
        yield
    except OSError as error:
        raise DiskError(option, f"{folder}: {error.strerror}; give another folder") from error


def claim(folder: Path, option: str = "--out") -> None:
    """Make the folder and check that it is writable, before anything slow starts.

    Raises DiskError.
    """
    with disk_errors(folder, option):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()


def remove_former_board(folder: Path) -> None:
    """Remove an earlier report's event files and the folders that this leaves empty."""
    for file in folder.rglob(f"events.out.tfevents.*{BOARD_MARK}"):
        file.unlink()
    for below in sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True):
        if not any(below.iterdir()):
            below.rmdir()


def json_text(comparison: Comparison) -> str:
    """Return the comparison as JSON, without curves; NaN and infinity become null."""
    node = {
        "folders": comparison.folders,
        "sections": [_section(section) for section in comparison.sections],
        "across": [_across(across) for across in comparison.across],
        "ladders": [_ladder(ladder) for ladder in comparison.ladders],
        "warnings": comparison.warnings,
        "passed_over": comparison.passed_over,
    }
    return json.dumps(_plain(node), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _section(section: Section) -> dict[str, Any]:
    return {
        "title": section.title,
        "baseline": section.baseline,
        "words": section_words(section),
        "match": match_words(section),
        "certainty": sure_words(section),
        "warnings": section.warnings,
        "rows": [_row(row) for row in section.rows],
        "lowest_loss": section.leader,
        "against_lowest_loss": [
            # Not d.shown: against the best, the stricter `_distinct_from_leader` decides.
            {"variant": d.variant, "difference": d.mean, "shown": d.variant not in section.alike}
            for d in section.rivals
        ],
        "loss_by_position": [asdict(one) for one in position_losses(section)],
        "loss_by_cache": [asdict(one) for one in cache_costs(section)],
    }


def _row(row: Row) -> dict[str, Any]:
    speed = row.speed and {"ratio": row.speed[0], "interval": row.speed[1]}
    return {
        "name": row.name,
        "variant": row.runs[0].variant,
        "n": row.n,
        "seeds": [run.seed for run in row.runs],
        "runs": [str(run.folder) for run in row.runs],
        "metrics": {metric: asdict(estimate) for metric, estimate in row.metrics.items()},
        "difference": row.difference and asdict(row.difference) | {"shown": row.difference.shown},
        "tokens_per_s_over_baseline": speed,
        "pareto_fronts": row.fronts,
        "settings": row.runs[0].settings,
    }


def _across(across: Across) -> dict[str, Any]:
    return {
        "setting": across.setting,
        "metric": across.metric,
        "where": across.where,
        "first": across.first,
        "second": across.second,
        "baseline": across.baseline,
        "words": sentences(across),
        "other_settings_that_differ": across.others,
        "losses": {name: _change(change) for name, change in across.losses.items()},
        "differences_to_baseline": {name: _change(change) for name, change in across.gaps.items()},
    }


def _ladder(report: LadderReport) -> dict[str, Any]:
    return {
        "where": report.where,
        "baseline": report.baseline,
        "words": ladder_words.sentences(report),
        "sizes": report.sizes,
        "seeds": report.seeds,
        "costs": {scaled.cost: _scaled(scaled) for scaled in report.costs},
    }


def _scaled(scaled: Scaled) -> dict[str, Any]:
    law = scaled.law
    return {
        "spent": {name: own.tolist() for name, own in scaled.ladder.compute.items()},
        "losses": {name: own.tolist() for name, own in scaled.ladder.losses.items()},
        "law": {
            "floor": law.floor,
            "unit": law.unit,
            "factors": law.factors,
            "exponents": law.exponents,
        },
        "misfit_p": scaled.misfit,
        "intervals_widened_by": scaled.widened,
        "at_loss": scaled.loss,
        "multipliers": {name: asdict(found) for name, found in scaled.multipliers.items()},
        "predicted": scaled.predicted,
        "measured": scaled.measured,
        "beyond": scaled.beyond,
    }


def _change(change: Change) -> dict[str, Any]:
    node = asdict(change)
    # Names of what is subtracted: it stands around this.
    del node["difference"]["variant"], node["difference"]["baseline"]
    node["difference"]["shown"] = change.difference.shown
    return node


def _plain(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _plain(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_plain(value) for value in node]
    return None if isinstance(node, float) and not math.isfinite(node) else node


def csv_text(comparison: Comparison) -> str:
    """Return the CSV: one line per row, one column per figure; an empty cell has no value."""
    rows = [(section, row) for section in comparison.sections for row in section.rows]
    known = set().union(*(row.metrics for _, row in rows))
    metrics = [metric for metric in METRICS if metric in known or metric not in OF_DATA]
    lines = [_line(section, row, metrics) for section, row in rows]
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: _inert(v) for k, v in line.items()} for line in lines)
    return out.getvalue()


def _inert(cell: Any) -> Any:
    """Prefix text that a spreadsheet would run as a formula with an apostrophe."""
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(FORMULA) else cell


def _line(section: Section, row: Row, metrics: Sequence[str]) -> dict[str, Any]:
    line: dict[str, Any] = {"section": section.title, "variant": row.name, "n": row.n}
    for metric in metrics:
        estimate = row.metrics.get(metric)
        low, high = (estimate and estimate.interval) or (None, None)
        line |= {
            metric: estimate and estimate.mean,
            f"{metric} low": low,
            f"{metric} high": high,
        }
    d = row.difference
    low, high = (d and d.interval) or (None, None)
    line |= {
        "baseline": section.baseline,
        "paired n": d and d.n,
        "difference": d and d.mean,
        "difference low": low,
        "difference high": high,
        "p": d and d.p,
        "comparisons": d and d.comparisons,
        "seeds needed": d and d.seeds_needed,
        "pareto": " ".join(row.fronts),
    }
    return line
