"""Groups of runs over seeds, which of them may be compared, and the report's table."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from reporting import compared
from runfolders import write_run

from gptattn.compare.differences import differences_in_provenance
from gptattn.compare.finished_runs import read_runs
from gptattn.compare.groups import comparable_sets, group_runs, pick_baseline
from gptattn.compare.table import short_rows
from gptattn.errors import ConfigError


def test_of_a_repeated_seed_the_newest_run_counts_and_the_other_is_named(tmp_path: Path) -> None:
    for name, seed, loss, time in (("b", 1, 2.0, 10), ("a", 1, 2.1, 20), ("c", 2, 2.5, 5)):
        write_run(tmp_path / name, "mha", seed, loss)
        os.utime(tmp_path / name / "summary.json", (time, time))
    found = compared(tmp_path)
    assert [(run.seed, run.metrics["val/loss"]) for run in found.runs] == [(1, 2.1), (2, 2.5)]
    assert found.skipped == [f"{tmp_path / 'b'}: a copy of a, which counts"]


def test_a_config_file_names_a_row_if_it_explains_the_difference(tmp_path: Path) -> None:
    def run(name: str, model: str, d_model: int, **more: object) -> None:
        choices = {"choices": {"attn": "mha", "model": model}}
        write_run(tmp_path / name, "mha", 1, 2.0, config=choices, d_model=d_model, **more)

    run("a", "tiny", 64, num_layers=2)
    run("b", "nano", 128, num_layers=4)
    assert set(group_runs(read_runs([tmp_path])[0])) == {"mha model=tiny", "mha model=nano"}
    run("c", "nano", 256, num_layers=4)
    assert "mha model.d_model=256 model.num_layers=4" in group_runs(read_runs([tmp_path])[0])


def test_a_metric_that_is_missing_or_nan_leaves_a_gap_in_the_table(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", "mha", 1, 2.0, metrics={"perf/tokens_per_s": float("nan")})
    summary = json.loads((run / "summary.json").read_text())
    del summary["metrics"]["cost/params"]
    (run / "summary.json").write_text(json.dumps(summary))
    cells = dict(zip(*short_rows(read_runs([tmp_path])[0]), strict=True))
    assert cells["tokens/s"] == cells["params"] == "\N{EN DASH}"
    assert cells["val loss"] == "2.0000"


def test_settings_that_change_no_result_do_not_separate_runs(tmp_path: Path) -> None:
    config: dict[str, Any] = {"sweep": {"jobs": 2}, "experiment_name": "a", "allow_targets": ["x"]}
    write_run(tmp_path / "a", "mha", 1, 2.0, config=config)
    # 1000 steps given, and 1000 steps by default, are the same budget.
    budget = {"steps": 1000, "tokens": None, "default_steps": 500}
    write_run(tmp_path / "b", "mha", 2, 2.0, config={"budget": budget, "experiment_name": "b"})
    assert [len(members) for members in group_runs(read_runs([tmp_path])[0]).values()] == [2]


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"data": {"text_sha256": "zzz"}}, "data (text abcdefgh, 99 validation tokens: 2 runs;"),
        ({"data": {"val_tokens": 98}}, "data ("),
        ({"data": {"tokenizer": "char"}}, "tokenizer (byte ByteTokenizer: 2 runs; char"),
        ({"config": {"tokenizer": {"_target_": "ByteTokenizer", "lower": True}}}, "lower=True"),
        ({"config": {"validation": {"fraction": 0.2}}}, "validation (validation.fraction=0.1: 2"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused_or_split(
    other: dict[str, Any], named: str, tmp_path: Path
) -> None:
    write_run(tmp_path / "a", "mha", 1, 2.0)
    write_run(tmp_path / "b", "gqa", 1, 2.0)
    write_run(tmp_path / "c", "gqa", 2, 2.0, **other)
    runs = read_runs([tmp_path])[0]
    with pytest.raises(ConfigError) as error:
        comparable_sets(runs, split=False)
    assert str(error.value).startswith("comparison: the runs differ in ")
    assert named in str(error.value)
    assert str(error.value).endswith("; --split reports each separately, or give fewer folders")
    assert sorted(len(found.runs) for found in comparable_sets(runs, split=True)) == [1, 2]


def test_the_baseline_is_the_named_row_or_mha_or_the_most_typical_row(
    tmp_path: Path,
) -> None:
    for variant, width in (("mqa", 1), ("mqa", 2), ("gqa", 1), ("mha", 1)):
        write_run(tmp_path / f"{variant}{width}", variant, 1, 2.0, d_mlp=width)
    groups = group_runs(read_runs([tmp_path])[0])
    assert pick_baseline(groups, None) == "mha"
    assert pick_baseline(groups, "gqa") == "gqa"
    assert pick_baseline(groups, "mqa model.d_mlp=2") == "mqa model.d_mlp=2"
    assert pick_baseline(groups, "mqa") is None
    del groups["mha"]
    assert pick_baseline(groups, None) == "mqa model.d_mlp=1"


def test_differences_in_code_and_machine_are_reported(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "mha", 1, 2.0, environment={"git_commit": "aaa", "threads": 2})
    write_run(tmp_path / "b", "mha", 2, 2.0, environment={"git_commit": "bbb", "threads": 2})
    libraries = {"libraries": {"torch": "2.12.0"}}
    write_run(tmp_path / "c", "mha", 3, 2.0, environment={"git_commit": "aaa", **libraries})
    assert differences_in_provenance(read_runs([tmp_path])[0]) == [
        "the runs differ in git_commit (aaa: 2 runs; bbb: 1 run)",
        "the runs differ in torch (2.13.0: 2 runs; 2.12.0: 1 run)",
        "the runs differ in threads (2: 2 runs; unknown: 1 run)",
    ]
