"""The report on uptraining says what simulated runs show, and no more."""

import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from runfolders import write_run, write_uptraining

from gptattn.cli.commands.uptrain_report import main
from gptattn.compare import statistics
from gptattn.compare.finished_runs import read_runs
from gptattn.compare.groups import group_runs
from gptattn.compare.results import Difference
from gptattn.compare.uptrain.experiment import Experiment, command_of, find_experiment
from gptattn.compare.uptrain.findings import find
from gptattn.compare.uptrain.uptrain_page import table_rows
from gptattn.compare.uptrain.uptrain_words import evidence, sentences, verdict

SCRATCH = {"mha": 1.5, "gqa": 1.52, "mqa": 1.55}
# As in the paper: rising from mean to random, less so with training, MQA farther off.
PAPER = {
    (target, method, steps): 1.5 + scale * off * (1 if steps == 0 else 0.1)
    for target, scale in (("gqa", 1), ("mqa", 3))
    for method, off in (("mean", 0.3), ("first", 0.5), ("random", 0.9))
    for steps in (0, 50)
}


def experiment(folder: Path, losses: dict[tuple[str, str, int], float], seeds: int) -> Experiment:
    write_uptraining(folder, losses, seeds=seeds, scratch=SCRATCH)
    return find_experiment(read_runs([folder])[0])


def said(found: Experiment) -> str:
    return "\n".join(sentences(found, find(found)))


def test_runs_are_sorted_into_originals_cells_and_from_scratch(tmp_path: Path) -> None:
    found = experiment(tmp_path, PAPER, seeds=2)
    assert (found.source, found.original_steps, found.tokens_per_step) == ("mha", 1000, 2048)
    assert (found.targets, found.steps) == (["gqa", "mqa"], [0, 50])
    assert found.methods == ["mean", "first", "random"]
    assert found.cells.keys() == PAPER.keys()
    assert {name: len(runs) for name, runs in found.scratch.items()} == {"gqa": 2, "mqa": 2}
    rows = {(row[0], row[1], row[2]): row for row in table_rows(found)}
    assert len(rows) == 1 + 3 + 12
    # 1.5 + 0.5 at seed 1, 0.001 more at seed 2; 0.5 above the original at both.
    row = rows["gqa", "mha, first", "0"]
    assert row[3:7] == ["0", "1,000", "2,048,000", "2"]
    assert row[7] in ("2.0005 ± 0.0063", "2.0005 ± 0.0064")
    assert row[8] == "+0.5000"
    assert rows["mqa", "mha, mean", "0.05"][3:6] == ["50", "1,050", "2,150,400"]


def test_the_papers_order_is_shown_by_three_seeds_where_it_holds_in_all(tmp_path: Path) -> None:
    found = experiment(tmp_path, PAPER, seeds=3)
    orders = find(found).orders
    assert [verdict(order) for order in orders] == ["shown"] * 4
    # One of the six orders of three methods, in each of three seeds; four cases.
    assert [order.p for order in orders] == pytest.approx([1 / 216] * 4)
    assert [order.p_holm for order in orders] == pytest.approx([4 / 216] * 4)
    words = said(found)
    assert "mean < first < random, is shown in all 4 cases" in words
    assert "8 of 8 pairs of neighbours in the order differ; first above mean: gqa at α = 0" in words
    # 1.8 is what the original's line, from 2.5 down to 1.5 in 1,000 steps, has at 700.
    assert "gqa by mean at α = 0 is 0.3000 nats above its mha" in words
    assert "after about 700 of its 1,000 steps: usable" in words
    # 2.4 at 100, where the first validation was: 0.9 above.
    assert "mqa by mean at α = 0 is 0.9000 nats above its mha" in words
    assert "before its first validation: not usable" in words
    assert "At α = 0, mqa is 0.6000 nats above gqa" in words
    assert "gqa by mean at α = 0.05 is 0.0100 nats above gqa from scratch" in words
    assert "1,000 steps, not 1,050" in words


def test_every_pair_of_neighbours_counts_in_the_correction(tmp_path: Path) -> None:
    orders = find(experiment(tmp_path, PAPER, seeds=3)).orders
    # Two pairs of methods, two targets, two shares of steps.
    assert {d.comparisons for order in orders for d in order.neighbours} == {8}


def test_kinds_of_comparison_have_a_correction_each(tmp_path: Path) -> None:
    findings = find(experiment(tmp_path, PAPER, seeds=3))
    assert [c.difference.comparisons for c in findings.converted] == [2, 2]
    assert [d.comparisons for d in findings.rivals] == [1]
    assert [d.comparisons for found in findings.scratch.values() for _, d in found] == [2, 2]


def test_what_is_the_same_at_every_seed_is_no_evidence() -> None:
    same = Difference("gqa", "mha", 3, 0.1, 0.0, None, None, 1, None)
    assert evidence(same) == " (n = 3, the same at every seed: chance cannot be judged)"


def test_an_order_that_does_not_hold_is_said_not_to(tmp_path: Path) -> None:
    swapped = {
        key: PAPER[key[0], {"mean": "first", "first": "mean"}.get(key[1], key[1]), key[2]]
        for key in PAPER
    }
    found = experiment(tmp_path, swapped, seeds=5)
    words = said(found)
    assert "is not shown at this scale, in none of 4 cases" in words
    assert "gqa, α = 0: no: first, mean, random (in 0 of 5 seeds" in words
    assert "first below mean" in words


def test_means_in_order_at_two_seeds_are_seen_not_shown(tmp_path: Path) -> None:
    found = experiment(tmp_path, PAPER, seeds=2)
    # 1/36 for each case, four cases.
    assert [order.p_holm for order in find(found).orders] == pytest.approx([4 / 36] * 4)
    assert "gqa, α = 0: seen, not shown (in 2 of 2 seeds, p = 0.11)" in said(found)


def test_one_seed_says_nothing_about_chance(tmp_path: Path) -> None:
    words = said(experiment(tmp_path, PAPER, seeds=1))
    assert "gqa, α = 0: seen, not shown (in 1 of 1 seed)." in words
    assert "says nothing about chance" in words


@pytest.mark.parametrize("n", [2, 3])
def test_the_p_of_an_order_is_that_of_all_permutations(n: int) -> None:
    losses = np.array([[1.0, 3.0, 2.0], [0.5, 0.7, 0.9], [2.0, 2.5, 2.2]])[:n]

    def page(ranks: tuple[tuple[int, ...], ...]) -> int:
        return sum(column * rank for row in ranks for column, rank in enumerate(row, start=1))

    observed = page(tuple(tuple(int(r) + 1 for r in row.argsort().argsort()) for row in losses))
    every = list(itertools.product(itertools.permutations((1, 2, 3)), repeat=n))
    expected = sum(page(ranks) >= observed for ranks in every) / len(every)
    assert statistics.order_p(losses) == pytest.approx(expected)


def test_runs_that_start_each_from_their_own_seeds_run_are_one_group(tmp_path: Path) -> None:
    write_uptraining(tmp_path, PAPER, seeds=3, scratch=SCRATCH)
    groups = group_runs(read_runs([tmp_path])[0])
    assert {len(members) for members in groups.values()} == {3}
    assert len(groups) == 3 + len(PAPER)


# The command


def report(folder: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> int:
    monkeypatch.setattr(sys, "argv", ["uptrain_report.py", str(folder), *more])
    with pytest.raises(SystemExit) as end:
        main()
    assert isinstance(end.value.code, int)
    return end.value.code


def test_the_command_writes_page_and_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = write_uptraining(tmp_path / "up", PAPER, seeds=3, scratch=SCRATCH)
    task = "task: [experiment=uptrain, 'seed=1,2,3']"
    stage = "hydra: [hydra.mode=MULTIRUN, 'hydra.sweeper.uptrain.lr=0.25']"
    task = f"hydra: {{overrides: {{{task}, {stage}}}}}"
    (sweep / "multirun.yaml").write_text(task)
    assert report(sweep, monkeypatch, "--out", str(tmp_path / "docs")) == 0
    assert "is shown in all 4 cases" in capsys.readouterr().out.replace("\n", " ")
    page = (tmp_path / "docs" / "uptrain.md").read_text(encoding="utf-8")
    assert "train.py -m experiment=uptrain seed=1,2,3 hydra.sweeper.uptrain.lr=0.25\n" in page
    assert "peak learning rate 0.002. Uptraining: peak 0.001" in page
    assert "| gqa | 0 | +0.2000 (+0." in page
    assert (tmp_path / "docs" / "uptrain.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (tmp_path / "docs" / "uptrain.svg").read_bytes()


def test_a_sweep_folder_without_a_command_has_none(tmp_path: Path) -> None:
    assert command_of(tmp_path) is None
    (tmp_path / "multirun.yaml").write_text("hydra: []")
    assert command_of(tmp_path) is None


def test_what_is_no_experiment_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "a" / "mha_s1", "mha", 1, 1.5)
    assert report(tmp_path / "a", monkeypatch) == 3
    assert "no run there started from the weights" in capsys.readouterr().err
    two = tmp_path / "two"
    write_uptraining(two / "x", PAPER, seeds=1, scratch=SCRATCH)
    write_uptraining(two / "y", PAPER, seeds=1, scratch=SCRATCH, lr=2e-3)
    assert report(two, monkeypatch) == 2
    assert "the uptrained runs differ in optim.lr (0.001: 12 runs; 0.002: 12 runs)" in (
        capsys.readouterr().err
    )


def test_a_child_whose_seed_is_not_its_originals_counts_for_nothing(tmp_path: Path) -> None:
    write_uptraining(tmp_path, PAPER, seeds=2, scratch=SCRATCH)
    foreign = tmp_path / "gqa_mean_0_s2" / "config.yaml"
    text = foreign.read_text()
    foreign.write_text(text.replace("mha_s2_000002", "mha_s1_000001"))
    assert "mha_s1_000001" in foreign.read_text()
    found = find_experiment(read_runs([tmp_path])[0])
    assert [run.seed for run in found.cells["gqa", "mean", 0]] == [1]
    assert json.loads((tmp_path / "gqa_mean_0_s2" / "summary.json").read_text())["seed"] == 2
