"""Curves read from rows, damaged or long ones too, and their mean and band over the seeds."""

import json
from pathlib import Path

import numpy as np
import pytest
from runfolders import curve_rows, write_curve, write_run

from gptattn.compare import curves
from gptattn.compare.curves import Band, average_curves, read_curves


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    found, damage = read_curves(write_curve(write_run(tmp_path / "a", "mha", 1, 2.0), 2.0))
    expected = [row for row in curve_rows(2.0) if "train/loss" in row]
    assert damage is None
    assert found.start == 1000.0
    assert found.train.loss.tolist() == [row["train/loss"] for row in expected]
    assert found.train.flops.tolist() == [row["progress/flops"] for row in expected]
    assert found.val.step.tolist() == [20, 40, 60, 80, 100]
    assert found.val.bits.tolist() == pytest.approx([2.0 / 0.7] * 5)


def test_a_record_cut_in_a_line_counts_up_to_there(tmp_path: Path) -> None:
    run = write_curve(write_run(tmp_path / "a", "mha", 1, 2.0), 2.0)
    whole = (run / "metrics.jsonl").read_bytes()
    lines = whole.split(b"\n")
    (run / "metrics.jsonl").write_bytes(b"\n".join(lines[:5]) + b"\n" + lines[5][:30])
    found, damage = read_curves(run)
    assert damage == f"{run}: metrics.jsonl is damaged after 5 rows; those count"
    assert found.train.step.tolist() == [1, 10, 20]
    assert found.val.step.tolist() == [20]


@pytest.mark.parametrize(
    "line", ["[]", '"text"', '{"step": "one"}', '{"train/loss": {}}', "\x00\x00", "[" * 100_000]
)
def test_a_line_of_another_kind_ends_the_record(line: str, tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", "mha", 1, 2.0)
    text = [json.dumps(row) for row in curve_rows(2.0)]
    (run / "metrics.jsonl").write_text("\n".join([*text[:4], line, *text[4:]]) + "\n")
    found, damage = read_curves(run)
    assert damage is not None
    assert "damaged after 4 rows" in damage
    assert found.train.step.tolist() == [1, 10, 20]


def test_rows_with_nan_leave_a_gap_and_no_more(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", "mha", 1, 2.0)
    rows_ = curve_rows(2.0)
    rows_[2]["train/loss"] = float("nan")
    rows_[-2]["val/loss"] = float("inf")
    rows_.append(rows_[-3] | {"step": 1e300})
    rows_.append(rows_[-3] | {"step": 101, "train/loss": 1e300})
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_))
    found, damage = read_curves(run)
    assert damage is None
    assert found.train.step.tolist() == [1, *range(20, 101, 10)]
    assert len(found.val) == 4


def test_a_record_that_is_missing_gives_no_curves(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", "mha", 1, 2.0)
    found, damage = read_curves(run)
    assert (len(found.train), len(found.val)) == (0, 0)
    assert damage == f"{run}: has no metrics.jsonl: no curves"


def test_of_steps_that_were_done_again_the_last_count(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", "mha", 1, 2.0)
    first, again = curve_rows(3.0), curve_rows(2.0)[7:]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in first + again))
    found, _ = read_curves(run)
    assert (np.diff(found.train.step) > 0).all()
    assert found.train.loss.iloc[-1] == curve_rows(2.0)[-3]["train/loss"]
    assert found.train.loss.iloc[0] == curve_rows(3.0)[1]["train/loss"]


def test_a_long_record_is_resampled(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", "mha", 1, 2.0)
    write_curve(run, 2.0, steps=8000, validations=800)
    found, damage = read_curves(run)
    assert damage is None
    losses = [row["train/loss"] for row in curve_rows(2.0, steps=8000) if "train/loss" in row]
    assert len(found.train) == curves.POINTS
    # 801 rows make 399 stretches of two and a last one of three.
    assert found.train.loss.iloc[0] == pytest.approx((losses[0] + losses[1]) / 2)
    assert found.train.loss.iloc[-1] == pytest.approx(sum(losses[-3:]) / 3)
    assert len(found.val) == curves.POINTS
    assert (found.val.step.iloc[0], found.val.step.iloc[-1]) == (10, 8000)


def test_bands_by_hand() -> None:
    x = np.array([0.0, 1.0, 2.0])
    ys = [np.array([1.0, 2.0, 3.0]), np.array([3.0, 4.0, 5.0]), np.array([2.0, 3.0, 4.0])]
    found = average_curves([(x, y) for y in ys])
    assert isinstance(found, Band)
    assert found.mean.tolist() == [2.0, 3.0, 4.0]
    # The deviation of 1, 2 and 3 is 1; half the band is t(0.975, 2) = 4.30265 / sqrt(3).
    assert found.low is not None
    assert found.low[0] == pytest.approx(2.0 - 4.30265 / 3**0.5, abs=1e-4)


def test_two_seeds_are_drawn_as_they_are_without_a_band() -> None:
    x = np.array([0.0, 1.0])
    found = average_curves([(x, np.array([1.0, 2.0])), (x, np.array([3.0, 4.0]))])
    assert found is not None
    assert (found.n, found.low, found.high) == (2, None, None)
    assert found.seeds.tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_curves_on_different_grids_meet_where_both_are() -> None:
    y = np.array([0.0, 4.0])
    found = average_curves([(np.array([0.0, 4.0]), y), (np.array([1.0, 6.0]), y)])
    assert found is not None
    assert (found.x[0], found.x[-1]) == (1.0, 4.0)
    # The lines are x and 0.8 (x - 1); at x = 1 they are 1 and 0.
    assert found.mean[0] == pytest.approx(0.5)
    assert average_curves([(np.array([0.0, 1.0]), y), (np.array([2.0, 3.0]), y)]) is None
    assert average_curves([]) is None
