"""Runs of different code, text or starting weights are never averaged, and the report says why."""

import os
from pathlib import Path

import pytest
from reporting import groups_in
from runfolders import write_run

from gptattn.compare.differences import differences_in_provenance
from gptattn.compare.finished_runs import read_runs
from gptattn.compare.rows import group_runs
from gptattn.compare.table import load_comparison

CHANGED = "gptattn.attention.variants.gqa"
NEW = {"code": {"gptattn.attention.core": "c0", CHANGED: "v1"}}


def aged(folder: Path, seconds: float) -> Path:
    os.utime(folder / "summary.json", (seconds, seconds))
    return folder


def test_runs_of_different_or_unknown_code_are_different_rows(tmp_path):
    write_run(tmp_path / "a", "gqa", 1, 2.0)
    write_run(tmp_path / "b", "gqa", 2, 3.0)
    write_run(tmp_path / "c", "gqa", 3, 5.0, identity=NEW)
    (write_run(tmp_path / "d", "gqa", 4, 2.0) / "identity.json").unlink()
    runs = read_runs([tmp_path])[0]
    groups = group_runs(runs)
    assert sorted(len(members) for members in groups.values()) == [1, 1, 2]
    assert set(groups) == {f"gqa code={run.code}" for run in runs}
    assert "gqa code=unknown" in groups
    unknown, changed = differences_in_provenance(runs)
    assert "1 run did not record the code" in unknown
    assert changed.endswith(CHANGED)


def test_differences_in_code_and_machine_are_reported(tmp_path):
    write_run(tmp_path / "a", "mha", 1, 2.0, environment={"git_commit": "aaa", "processes": 2})
    write_run(tmp_path / "b", "mha", 2, 2.0, environment={"git_commit": "bbb", "processes": 2})
    libraries = {"libraries": {"torch": "2.12.0"}}
    write_run(tmp_path / "c", "mha", 3, 2.0, environment={"git_commit": "aaa", **libraries})
    lines = " ".join(differences_in_provenance(read_runs([tmp_path])[0]))
    for words in ("(aaa: 2 runs; bbb: 1 run)", "torch (2.13.0: 2", "processes (2: 2 runs; unknown"):
        assert words in lines


def test_of_a_repeated_seed_the_newest_run_counts_and_the_other_is_named(tmp_path):
    for name, seed, loss, time in (("b", 1, 2.0, 10), ("a", 1, 2.1, 20), ("c", 2, 2.5, 5)):
        aged(write_run(tmp_path / name, "mha", seed, loss), time)
    found = load_comparison(tmp_path)
    assert [(run.seed, run.metrics["val/loss"]) for run in found.runs] == [(1, 2.1), (2, 2.5)]
    (line,) = found.skipped
    assert line.startswith(f"{tmp_path / 'b'}: ")


def test_a_run_repeated_after_an_edit_replaces_the_old_one(tmp_path):
    old = aged(write_run(tmp_path / "s" / "old", "gqa", 1, 2.0), 1e9)
    write_run(tmp_path / "s" / "new", "gqa", 1, 3.0, identity=NEW)
    write_run(tmp_path / "s" / "mha", "mha", 1, 3.0)
    comparison = load_comparison(tmp_path)
    assert [run.folder.name for run in comparison.runs] == ["mha", "new"]
    assert comparison.skipped == [f"{old}: replaced by new (different code in {CHANGED})"]


def of_own_seeds(changed: str) -> list[tuple[str, str]]:
    return [(f"outputs/up/mha_s{i}{changed}_{i:06x}", f"w{i}") for i in (1, 2)]


@pytest.mark.parametrize(
    ("started", "rows"),
    [
        ([("A/w", None), ("B/w", None)], {"gqa init_from=A/w": 1, "gqa init_from=B/w": 1}),
        (
            [("A/w", "0123456789"), ("A/w", "9876543210")],
            {"gqa init_from=A/w 01234567": 1, "gqa init_from=A/w 98765432": 1},
        ),
        ([("A/w", "w1"), ("A/w", "w1")], {"gqa": 2}),
        (of_own_seeds(""), {"gqa": 2}),
        (of_own_seeds("+model-nano"), {"gqa": 2}),
    ],
)
def test_runs_from_other_weights_share_a_row_if_equal_or_one_per_seed(started, rows, tmp_path):
    for seed, (path, digest) in enumerate(started, start=1):
        identity, config = {"weights": digest}, {"init_from": path}
        write_run(tmp_path / f"r{seed}", "gqa", seed, 2.0, config=config, identity=identity)
    assert {name: len(members) for name, members in groups_in(tmp_path).items()} == rows
