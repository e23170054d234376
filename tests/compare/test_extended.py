"""An extended run counts as it was when its first budget ended, never as it was in between."""

from pathlib import Path
from typing import Any

import pytest
from interrupted import crash, once
from reporting import only_section
from runfolders import TOKENS, write_rows, write_run
from support import command, summary

from gptattn.compare.curves import average_rows, choose_curves, read_all_curves
from gptattn.compare.table import load_comparison


def steps(count: int) -> dict[str, Any]:
    return {"budget": {"steps": count, "tokens": None, "default_steps": 1000}}


def write_extended(
    folder: Path, variant: str, seed: int, losses: dict[int, float], **config: Any
) -> Path:
    """Write a run with one budget after another; `losses` maps each budget's steps to its loss.

    It is validated within each budget, too, at three quarters.
    """
    last = max(losses)
    ends = [{**steps(n), "step": n, "metrics": {"val/loss": x}} for n, x in losses.items()]
    done = {"steps": last, "completed": ends}
    run = write_run(folder, variant, seed, losses[last], config=steps(last) | config, summary=done)
    rows = []
    for step, loss in losses.items():
        for at, share, value in ((step * 3 // 4, 0.75, 9.0), (step, 1.0, loss)):
            progress = {f"progress/{axis}": at for axis in ("seconds", "flops")}
            progress |= {"progress/tokens": at * TOKENS, "progress/budget": share}
            rows.append({"step": at, "time": 1.0, "val/loss": value, **progress})
    write_rows(run, rows)
    return run


def test_an_extended_run_counts_where_its_first_budget_ended(tmp_path):
    run = write_extended(tmp_path / "mha1", "mha", 1, {1000: 2.0, 2000: 1.5})
    write_run(tmp_path / "mha2", "mha", 2, 2.2, config=steps(1000))
    for seed, loss in ((1, 2.3), (2, 2.4)):
        write_run(tmp_path / f"gqa{seed}", "gqa", seed, loss, config=steps(1000))
    found = load_comparison(tmp_path)
    mha, gqa = found.sections[0].rows
    assert (mha.n, mha.loss) == (2, pytest.approx(2.1))
    assert mha.mean("cost/params") == 1200
    assert (gqa.difference.n, gqa.difference.mean) == (2, pytest.approx(0.25))
    assert found.warnings[0] == (
        f"{run} was extended (1000 steps, then 2000 steps): it is compared at the end of its "
        "first budget; its final loss, 1.5000, is not compared: no other variant was extended the "
        "same way"
    )


def test_runs_extended_alike_are_compared_at_both_ends(tmp_path):
    write_extended(tmp_path / "a", "mha", 1, {1000: 2.0, 2000: 1.5})
    write_extended(tmp_path / "b", "gqa", 1, {1000: 2.1, 2000: 1.7})
    # It had one schedule of 2,000 steps, which is not what the other two had.
    write_run(tmp_path / "c", "mha", 1, 1.4, config=steps(2000))
    found = load_comparison(tmp_path)
    assert [(s.title, [row.loss for row in s.rows]) for s in found.sections] == [
        ("1,000 steps", [2.0, 2.1]),
        ("1,000 steps, then 2,000 steps", [1.5, 1.7]),
        ("2,000 steps", [1.4]),
    ]


def test_the_curve_of_an_extended_run_ends_with_its_first_budget(tmp_path):
    write_extended(tmp_path / "a", "mha", 1, {1000: 2.0, 2000: 1.5})
    found = load_comparison(tmp_path)
    (section,) = found.sections
    curves, _ = read_all_curves(found.runs)
    (band,) = average_rows(section, curves, "val", "step").values()
    assert band.x.tolist() == [750, 1000]
    assert band.mean.tolist() == [9.0, 2.0]
    assert choose_curves(section, curves) == "train"  # the extension has the other two validations


def test_a_run_records_its_metrics_at_the_end_of_each_budget(finished, tmp_path, monkeypatch):
    run = finished
    first = summary(run)
    longer = ("budget.steps=8", "validation.count=1")
    with monkeypatch.context() as patch:
        # The run dies during its extension, when the summary of its first budget is gone.
        once(patch, "training_step", 7, crash)
        assert command(tmp_path, "resume=run", *longer) == 1
    assert command(tmp_path, "resume=run", *longer) == 0
    ends = summary(run)["completed"]
    assert [(end["budget"]["steps"], end["step"]) for end in ends] == [(6, 6), (8, 8)]
    for name in ("val/loss", "val/bits_per_byte", "perf/tokens_per_s"):
        assert ends[0]["metrics"][name] == first["metrics"][name]
    assert ends[1]["metrics"]["val/loss"] == summary(run)["metrics"]["val/loss"]
    assert only_section(run).rows[0].loss == first["metrics"]["val/loss"]
