"""Curves read from rows, damaged or long ones too, and their mean and band over the seeds."""

from pathlib import Path

import numpy as np
import pytest
from runfolders import curve_rows, write_rows, write_sweep

from gptattn.compare import curves
from gptattn.compare.curves import average_curves, read_curves


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run whose curves are those of `curve_rows(2.0)`."""
    return write_sweep(tmp_path, {"mha": [2.0]}) / "mha_s1"


def test_a_record_is_read_as_it_was_written(run):
    found, damage = read_curves(run)
    expected = [row for row in curve_rows(2.0) if "train/loss" in row]
    assert damage is None
    assert found["train"].loss.tolist() == [row["train/loss"] for row in expected]
    assert found["train"].flops.tolist() == [row["progress/flops"] for row in expected]
    assert found["val"].step.tolist() == [20, 40, 60, 80, 100]


@pytest.mark.parametrize("line", ['{"step": 4', "[]", '{"train/loss": {}}'])
def test_a_record_counts_up_to_its_first_damaged_line(line, run):
    lines = (run / "metrics.jsonl").read_bytes().split(b"\n")
    (run / "metrics.jsonl").write_bytes(b"\n".join([*lines[:5], line.encode(), *lines[5:]]))
    found, damage = read_curves(run)
    assert damage == f"{run}: metrics.jsonl is damaged after 5 rows; only these are used"
    assert found["train"].step.tolist() == [1, 10, 20]
    assert found["val"].step.tolist() == [20]


def test_rows_with_nan_leave_a_gap_and_no_more(run):
    rows = curve_rows(2.0)
    rows[2]["train/loss"] = float("nan")
    rows[-2]["val/loss"] = float("inf")
    rows.append(rows[-3] | {"step": 101, "train/loss": 1e300})
    write_rows(run, rows)
    found, damage = read_curves(run)
    assert damage is None
    assert found["train"].step.tolist() == [1, *range(20, 101, 10)]
    assert len(found["val"]) == 4


def test_a_long_record_is_resampled(run):
    rows = curve_rows(2.0, steps=8000, validations=800)
    write_rows(run, rows)
    found, damage = read_curves(run)
    assert damage is None
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    assert len(found["train"]) == curves.POINTS
    # 801 rows make a stretch of three and 399 of two.
    assert found["train"].loss.iloc[0] == pytest.approx(sum(losses[:3]) / 3)
    assert found["train"].loss.iloc[-1] == pytest.approx(sum(losses[-2:]) / 2)
    assert len(found["val"]) == 800


def test_bands_by_hand():
    x = np.array([0.0, 1.0, 2.0])
    found = average_curves([(x, x + 1), (x, x + 3), (x, x + 2)])
    assert found.mean.tolist() == [2.0, 3.0, 4.0]
    # The deviation of 1, 2 and 3 is 1; half the band is t(0.975, 2) = 4.30265 / sqrt(3).
    assert found.low[0] == pytest.approx(2.0 - 4.30265 / 3**0.5, abs=1e-4)
    # Two seeds have no interval: the band spans them.
    found = average_curves([(x, x + 1), (x, x + 3)])
    both = [found.low.tolist(), found.high.tolist()]
    assert found.seeds.tolist() == both == [[1.0, 2.0, 3.0], [3.0, 4.0, 5.0]]


def test_curves_on_different_grids_meet_where_both_are():
    y = np.array([0.0, 4.0])
    found = average_curves([(np.array([0.0, 4.0]), y), (np.array([1.0, 6.0]), y)])
    assert (found.x[0], found.x[-1]) == (1.0, 4.0)
    # The lines are x and 0.8 (x - 1); at x = 1 they are 1 and 0.
    assert found.mean[0] == pytest.approx(0.5)
    assert average_curves([(np.array([0.0, 1.0]), y), (np.array([2.0, 3.0]), y)]) is None
    assert average_curves([]) is None
