"""Uptrained runs are compared with their originals, and only claims that tests support are made."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from runfolders import write_run, write_uptraining
from scipy.stats import ttest_rel

from gptattn.cli.commands.compare import main
from gptattn.compare.comparison import compare
from gptattn.compare.finished_runs import read_runs
from gptattn.compare.groups import group_runs
from gptattn.compare.results import Comparison, Difference, Row, Section
from gptattn.compare.table import report_rows, rows
from gptattn.compare.verdicts import headline, section_words

SCRATCH = {"mha": 1.5, "gqa": 1.52, "mqa": 1.55}
# As in the paper: losses rise from mean to random, less so after training, and more for MQA.
PAPER = {
    (target, method, steps): 1.5 + scale * off * (1 if steps == 0 else 0.1)
    for target, scale in (("gqa", 1), ("mqa", 3))
    for method, off in (("mean", 0.3), ("first", 0.5), ("random", 0.9))
    for steps in (0, 50)
}


def compared(folder: Path, losses: dict[tuple[str, str, int], float], seeds: int) -> Comparison:
    write_uptraining(folder, losses, seeds=seeds, scratch=SCRATCH)
    return compare(read_runs([folder])[0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs with the losses in PAPER at three seeds. Tests must not change them."""
    folder = tmp_path_factory.mktemp("up") / "runs"
    return write_uptraining(folder, PAPER, seeds=3, scratch=SCRATCH)


@pytest.fixture(scope="module")
def sections(folder: Path) -> list[Section]:
    return compare(read_runs([folder])[0]).sections


def names(rows: list[Row]) -> list[str]:
    return [row.name for row in rows]


def pair(section: Section, variant: str, baseline: str) -> Difference:
    (found,) = [d for d in section.pairs if (d.variant, d.baseline) == (variant, baseline)]
    return found


def test_each_share_of_steps_is_a_section_with_the_originals(sections: list[Section]) -> None:
    scratch, *uptrained = sections
    assert (scratch.title, names(scratch.rows)) == ("", ["mha", "gqa", "mqa"])
    assert [section.title for section in uptrained] == [
        "uptrained from mha: 0 steps after 1,000 (α = 0)",
        "uptrained from mha: 50 steps after 1,000 (α = 0.05)",
    ]
    assert [section.share for section in sections] == [None, 0, 0.05]
    for section in uptrained:
        assert section.baseline == "mha"
        made = {f"{target} by {method}" for target, method, _ in PAPER}
        assert set(names(section.rows)) == {"mha"} | made
        assert {row.n for row in section.rows} == {3}
        assert names(section.from_scratch) == ["gqa from scratch", "mqa from scratch"]


def test_the_table_has_losses_and_differences_to_the_original(sections: list[Section]) -> None:
    rows = {row[0]: row[1:5] for row in report_rows(sections[1])}
    # 1.5 + 0.5 at seed 1 and 0.001 more at each further seed: 0.5 above the original at each.
    assert rows["gqa by first"][:3] == ["3", "2.0010 ± 0.0025", "+0.5000"]
    assert rows["gqa from scratch"] == ["3", "1.5210 ± 0.0025", "–", "–"]  # noqa: RUF001
    assert {row[0]: row[3] for row in report_rows(sections[2])}["mqa by random"] == "+0.2700"


def test_methods_are_held_against_their_neighbours_and_the_first_against_scratch(
    sections: list[Section],
) -> None:
    _, at_once, trained = sections
    found = {(d.variant, d.baseline): d.mean for d in trained.pairs}
    assert found == {
        ("gqa by first", "gqa by mean"): pytest.approx(0.02, abs=1e-4),
        ("gqa by random", "gqa by first"): pytest.approx(0.04, abs=1e-4),
        ("gqa by mean", "gqa from scratch"): pytest.approx(0.01, abs=1e-4),
        ("mqa by first", "mqa by mean"): pytest.approx(0.06, abs=1e-4),
        ("mqa by random", "mqa by first"): pytest.approx(0.12, abs=1e-4),
        ("mqa by mean", "mqa from scratch"): pytest.approx(0.04, abs=1e-4),
    }
    # Without uptraining steps, from scratch has no comparable number of steps.
    assert not [d for d in at_once.pairs if "scratch" in d.baseline]
    words = "\n".join(section_words(trained))
    assert "gqa by mean is worse than mha by 0.0300 nats (95% interval" in words
    assert "gqa by first is worse than gqa by mean by 0.0200 nats (95% interval" in words
    assert "mqa by mean is worse than mqa from scratch by 0.0400 nats (95% interval" in words


def test_each_kind_of_comparison_shares_one_correction(sections: list[Section]) -> None:
    _, at_once, trained = sections
    for section in (at_once, trained):
        assert {row.difference.comparisons for row in section.rows if row.difference} == {6}
    assert {d.comparisons for d in at_once.pairs} == {4}
    assert {d.comparisons for d in trained.pairs} == {6}


def test_a_pairs_interval_is_that_of_the_paired_t_test(sections: list[Section]) -> None:
    d = pair(sections[2], "gqa by first", "gqa by mean")
    losses = {
        row.name: [run.metrics["val/loss"] for run in sorted(row.runs, key=lambda run: run.seed)]
        for row in sections[2].rows
    }
    theirs = ttest_rel(losses["gqa by first"], losses["gqa by mean"])
    assert d.interval == pytest.approx(tuple(theirs.confidence_interval(1 - 0.05 / 6)))
    assert d.p == pytest.approx(min(1, 6 * theirs.pvalue))


def test_another_order_than_the_papers_is_said(tmp_path: Path) -> None:
    swapped = {
        key: PAPER[key[0], {"mean": "first", "first": "mean"}.get(key[1], key[1]), key[2]]
        for key in PAPER
    }
    words = "\n".join(section_words(compared(tmp_path, swapped, seeds=5).sections[1]))
    assert "gqa by first is better than gqa by mean by 0.2000 nats" in words
    assert "gqa by random is worse than gqa by first by 0.6000 nats" in words


def test_one_seed_says_nothing_about_chance(tmp_path: Path) -> None:
    words = section_words(compared(tmp_path, PAPER, seeds=1).sections[2])
    (line,) = [line for line in words if "between gqa by first and gqa by mean" in line]
    assert "n = 1: a single pair (+0.0200 nats) has no spread over seeds" in line


def test_what_uptraining_had_otherwise_is_told(sections: list[Section]) -> None:
    assert [section.warnings for section in sections[1:]] == [
        ["uptraining used optim.lr=0.001, the originals 0.002"]
    ] * 2


def test_runs_that_start_each_from_their_own_seeds_run_are_one_group(folder: Path) -> None:
    groups = group_runs(read_runs([folder])[0])
    assert {len(members) for members in groups.values()} == {3}
    assert len(groups) == 3 + len(PAPER)


def test_a_run_counts_once_however_many_sections_show_it(folder: Path) -> None:
    found = compare(read_runs([folder])[0])
    assert len(found.runs) == 3 * (3 + len(PAPER))
    assert headline(found).startswith("45 runs, 9 variants, 3 seeds each, in 3 sections")


def test_a_table_without_sections_says_how_long_and_from_what(folder: Path, tmp_path: Path) -> None:
    heading, *found = rows(read_runs([folder])[0])
    assert [row[0] for row in found[:3]] == ["mha", "gqa", "mqa"]
    made = {f"{t} by {m}, α = {steps / 1000:g}" for t, m, steps in PAPER}
    assert {row[0] for row in found[3:]} == made
    losses = {row[0]: row[heading.index("val loss")] for row in found}
    assert losses["gqa by first, α = 0"] == "2.0010 ± 0.0025"
    # A second group of originals, with another learning rate.
    for file in shutil.copytree(folder, tmp_path / "runs").glob("*/config.yaml"):
        text = file.read_text().replace("mha_s", "mha_b_s").replace("lr: 0.002", "lr: 0.003")
        file.write_text(text)
        file.parent.rename(file.parent.with_name(file.parent.name.replace("mha_s", "mha_b_s")))
    names = {row[0] for row in rows(read_runs([folder, tmp_path / "runs"])[0])}
    assert {f"gqa by mean, α = 0 of mha optim.lr={lr}" for lr in ("0.002", "0.003")} <= names


# Which runs belong together


def edit(run: Path, **changes: Any) -> None:
    node = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8")) | changes
    (run / "config.yaml").write_text(yaml.safe_dump(node), encoding="utf-8")


def row(found: Comparison, title: str, name: str) -> Row:
    (section,) = [section for section in found.sections if section.title.startswith(title)]
    (member,) = [row for row in section.rows if row.name == name]
    return member


def test_a_rate_of_its_own_makes_a_row_of_its_own(tmp_path: Path) -> None:
    few = {("gqa", method, 50): 1.6 for method in ("mean", "first")}
    write_uptraining(tmp_path / "x", few, seeds=2, scratch=SCRATCH)
    write_uptraining(tmp_path / "y", few, seeds=2, scratch=SCRATCH, lr=2e-3)
    section = compare(read_runs([tmp_path])[0]).sections[-1]
    made = {f"gqa by {m} optim.lr={lr}" for m in ("mean", "first") for lr in ("0.001", "0.002")}
    assert set(names(section.rows)) == {"mha"} | made
    # A pair shares its learning rate.
    pairs = {(d.baseline, d.variant) for d in section.pairs if "scratch" not in d.baseline}
    assert pairs == {
        (f"gqa by mean optim.lr={lr}", f"gqa by first optim.lr={lr}") for lr in ("0.001", "0.002")
    }


@pytest.mark.parametrize(
    "change",
    [
        {"init_from": "elsewhere/mha_s1_000001"},  # a run of another seed
        {"init_from": "elsewhere/mha_s2_999999"},  # a run that was not read
        {"batch_size": 8},
    ],
)
def test_a_run_that_has_no_original_here_is_not_held_against_it(
    change: dict[str, Any], tmp_path: Path
) -> None:
    write_uptraining(tmp_path, PAPER, seeds=2, scratch=SCRATCH)
    edit(tmp_path / "gqa_mean_0_s2", **change)
    found = compare(read_runs([tmp_path])[0])
    assert [run.seed for run in row(found, "uptrained from mha: 0", "gqa by mean").runs] == [1]
    apart = [run for s in found.sections if s.share is None for r in s.rows for run in r.runs]
    assert tmp_path / "gqa_mean_0_s2" in [run.folder for run in apart]


def test_going_on_as_before_is_no_conversion(tmp_path: Path) -> None:
    write_uptraining(tmp_path, {("mha", "mean", 50): 1.4}, seeds=2, scratch=SCRATCH)
    assert [section.share for section in compare(read_runs([tmp_path])[0]).sections] == [None] * 2


def test_no_share_is_taken_of_a_run_without_steps(tmp_path: Path) -> None:
    write_uptraining(tmp_path, {("gqa", "mean", 0): 1.6}, seeds=2, scratch={"mha": 1.5})
    for run in tmp_path.glob("mha_*"):
        node = json.loads((run / "summary.json").read_text())
        (run / "summary.json").write_text(json.dumps(node | {"steps": 0}))
    assert {section.share for section in compare(read_runs([tmp_path])[0]).sections} == {None}


def test_a_method_that_nobody_knows_is_a_row_like_others(tmp_path: Path) -> None:
    write_uptraining(tmp_path, PAPER, seeds=2, scratch=SCRATCH)
    for run in tmp_path.glob("gqa_random_50_*"):
        edit(run, init_method="<b>")
    found = compare(read_runs([tmp_path])[0])
    assert row(found, "uptrained from mha: 50", "gqa by <b>").n == 2
    report(tmp_path)
    assert "<b>" not in (tmp_path / "comparison" / "comparison.html").read_text()


# The command


def report(*arguments: object) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["gptattn-compare", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
    assert end.value.code == 0


def test_the_report_has_a_plot_of_loss_against_share(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    report(folder, "--out", out)
    assert "uptrained from mha: 50 steps after 1,000 (α = 0.05)" in capsys.readouterr().out
    assert (out / "loss_uptraining.png").read_bytes().startswith(b"\x89PNG")
    svg = (out / "loss_uptraining.svg").read_text(encoding="utf-8")
    for text in ("mha, the original", "the target from scratch", "mean", "first", "random", "mqa"):
        assert f">{text}</text>" in svg
    page = (out / "comparison.html").read_text(encoding="utf-8")
    assert "Loss against uptraining" in page
    assert "gqa by first is worse than gqa by mean by 0.0200 nats" in page
    assert "A section on uptraining" in page
    node = json.loads((out / "comparison.json").read_text(encoding="utf-8"))["sections"][2]
    assert (node["share_of_original_steps"], len(node["pairs"])) == (0.05, 6)
    assert {found["name"] for found in node["from_scratch"]} == {
        "gqa from scratch",
        "mqa from scratch",
    }


@pytest.mark.usefixtures("undrawn")
def test_a_report_without_uptraining_speaks_of_none(tmp_path: Path) -> None:
    write_uptraining(tmp_path / "runs", {("gqa", "mean", 0): 1.6}, seeds=2, scratch={"mha": 1.5})
    report(tmp_path / "runs")
    out = tmp_path / "runs" / "comparison"
    assert (out / "loss_uptraining.svg").is_file()
    for run in (tmp_path / "runs").glob("gqa_*"):
        shutil.rmtree(run)
    write_run(tmp_path / "runs" / "gqa_s1", "gqa", 1, 1.5)
    report(tmp_path / "runs")
    assert not list(out.glob("loss_uptraining.*"))
    page = (out / "comparison.html").read_text(encoding="utf-8")
    assert "Loss against uptraining" not in page
    assert "A section on uptraining" not in page
