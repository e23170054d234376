"""The report of what was evaluated: figures by hand, plots, tables, and files not to be trusted."""

import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from reporting import only_section, page_text, report
from runfolders import write_sweep

from gptattn.compare.curves import cache_costs, position_losses
from gptattn.compare.finished_runs import read_runs
from gptattn.compare.table import evaluation_tables, load_comparison
from gptattn.runs.evaluation import Basis, Bin, CacheLoss, Evaluation, LengthLoss, TaskScores
from gptattn.runs.folder import RunFolder

LOSSES: dict[str, Sequence[float]] = {"mha": [2.0, 2.02, 2.04], "gqa": [2.1, 2.13, 2.13]}
T975 = 4.302653  # Student's t for two degrees of freedom, from a table


def evaluation(seed: int, loss: float, step: int = 1000) -> Evaluation:
    """Trained at 4; beyond 6, the loss is higher by 0.1 for seed 1, 0.2 for seed 2, and so on."""
    bins = [Bin(1, 1, loss + 1), Bin(2, 2, loss), Bin(3, 3, loss), Bin(4, 4, loss)]
    longer = [*bins, Bin(5, 6, loss), Bin(7, 8, loss + 0.1 * seed)]
    return Evaluation(
        basis=Basis(f"weights {loss}", "text", "code", "cpu"),
        step=step,
        context_length=4,
        lengths={4: LengthLoss(20, loss + 0.25, bins), 8: LengthLoss(10, loss + 0.2, longer)},
        caches={
            "full": CacheLoss(loss, 4096),
            "int4": CacheLoss(loss + 0.01 * seed, 1024),
            "window:2": CacheLoss(loss + 0.5, 2048),
        },
    )


def scores(right: Sequence[int], digest: str = "same") -> TaskScores:
    """Of a task with an item for each of `right`."""
    value = sum(right) / len(right)
    means = {"acc": [float(x) for x in right]}
    return TaskScores("told", "0.4.13", 5, digest, {"acc": value, "ppl": 9.0}, {"acc": 0.25}, means)


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """A sweep whose runs have been evaluated."""
    write_sweep(tmp_path / "runs", LOSSES)
    for variant, losses in LOSSES.items():
        for seed, loss in enumerate(losses, start=1):
            run = RunFolder(tmp_path / "runs" / f"{variant}_s{seed}")
            run.write_evaluation(evaluation(seed, loss))
    return tmp_path / "runs"


def test_losses_by_position_and_cache_are_those_worked_out_by_hand(sweep):
    found = only_section(sweep)
    shown = [(one.variant, one.length) for one in position_losses(found)]
    assert shown == [("mha", 4), ("mha", 8), ("gqa", 4), ("gqa", 8)]
    longer = position_losses(found)[1]
    assert (longer.trained, longer.loss.n) == (4, 3)
    assert longer.loss.mean == pytest.approx(2.22)
    # Half of the positions beyond 4: 2.05, 2.12 and 2.19.
    assert longer.beyond.mean == pytest.approx(2.12)
    # Of contexts 7 and 8. 2.1, 2.22 and 2.34: a deviation of 0.12.
    band, half = longer.band, T975 * 0.12 / 3**0.5
    ends = [line[-1] for line in (band.x, band.mean, band.low, band.high)]
    assert ends == pytest.approx([7.5, 2.22, 2.22 - half, 2.22 + half], abs=1e-5)
    caches = [one for one in cache_costs(found) if one.variant == "gqa"]
    sizes = [(one.cache, one.bytes_per_token) for one in caches]
    assert sizes == [("full", 1024), ("window:2", 512), ("int4", 256)]
    assert caches[0].change is None
    # 0.01, 0.02 and 0.03, however much the losses differ.
    half = T975 * 0.01 / 3**0.5
    assert caches[2].change.mean == pytest.approx(0.02)
    assert caches[2].change.interval == pytest.approx((0.02 - half, 0.02 + half), abs=1e-5)


def test_the_page_shows_plots_and_tables(sweep):
    report(sweep)
    page = page_text(sweep / "comparison" / "comparison.html")
    titles = ("windows of 4 tokens.", "windows of 8 tokens.", "the trained length, 4 tokens")
    for shown in (*titles, "8, beyond 4", "+0.0200 ± 0.0248", "25.0%"):
        assert shown in page
    for name in ("loss_position", "loss_position_beyond", "loss_cache"):
        assert (sweep / "comparison" / f"{name}.png").stat().st_size > 1000
        drawn = ET.parse(sweep / "comparison" / f"{name}.svg").iter()
        assert set(LOSSES) <= {"".join(node.itertext()) for node in drawn}


def test_what_is_of_other_weights_is_not_shown(sweep):
    RunFolder(sweep / "mha_s2").write_evaluation(evaluation(2, 2.02, step=999))
    first = position_losses(only_section(sweep))[0]
    assert (first.variant, first.loss.n) == ("mha", 2)
    assert first.loss.mean == pytest.approx(np.mean([2.0, 2.04]) + 0.25)


def test_a_damaged_evaluation_costs_no_run(sweep):
    (sweep / "mha_s1" / "evaluation.json").write_text('{"basis": 1}')
    runs, (line,) = read_runs([sweep])
    assert "mha_s1: its evaluation: evaluation.json is damaged: " in line
    assert [run.folder.name for run in runs if run.evaluation is None] == ["mha_s1"]
    assert len(runs) == 6


def test_scores_on_tasks_are_paired_by_item_where_the_items_are_the_same(sweep):
    right = {"mha_s1": [1, 1, 0, 0], "mha_s2": [1, 0, 0, 0], "gqa_s1": [1, 1, 1, 0]}
    for name, own in right.items():
        run = RunFolder(sweep / name)
        tasks = {"told": scores(own), "other": scores(own, name)}
        run.write_evaluation(msgspec.structs.replace(run.read_evaluation(), tasks=tasks))
    *_, table = evaluation_tables(only_section(sweep))
    # By item: 0, 1 - 0.5, 1 and 0; a deviation of 0.4787, and t is 3.1824 for three degrees.
    change = f"+0.3750 ± {3.182446 * 0.478714 / 2:.4f}"
    assert table.cells == [
        ["variant", "task", "metric", "shots", "n", "score", "std error", "vs mha", "lm_eval"],
        ["mha", "told", "acc", "5", "2", "0.3750", "0.2500", "\u2013", "0.4.13"],
        ["mha", "told", "ppl", "5", "2", "9.0000", "\u2013", "\u2013", "0.4.13"],
        ["mha", "other", "acc", "5", "1", "0.2500", "0.2500", "\u2013", "0.4.13"],
        ["mha", "other", "ppl", "5", "1", "9.0000", "\u2013", "\u2013", "0.4.13"],
        ["gqa", "told", "acc", "5", "1", "0.7500", "0.2500", change, "0.4.13"],
        ["gqa", "told", "ppl", "5", "1", "9.0000", "\u2013", "\u2013", "0.4.13"],
        ["gqa", "other", "acc", "5", "1", "0.7500", "0.2500", "\u2013", "0.4.13"],
        ["gqa", "other", "ppl", "5", "1", "9.0000", "\u2013", "\u2013", "0.4.13"],
    ]
    (found,) = load_comparison(sweep, metrics=["lm_eval/told/acc"]).sections
    assert found.rows[0].metrics["lm_eval/told/acc"].mean == pytest.approx(0.375)
