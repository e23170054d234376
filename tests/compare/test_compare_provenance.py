"""Runs of different code, text or starting weights are never averaged, and the report says why."""

import os
from pathlib import Path

import pytest
from reporting import compared
from runfolders import write_run

from gptattn.compare.differences import differences_in_provenance
from gptattn.compare.finished_runs import read_runs, without_replaced
from gptattn.compare.groups import group_runs

NEW = {"gptattn.attention.variants.gqa": "v1"}


def aged(folder: Path, seconds: float) -> Path:
    os.utime(folder / "summary.json", (seconds, seconds))
    return folder


def test_runs_of_different_code_are_different_rows(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "gqa", 1, 2.0)
    write_run(tmp_path / "b", "gqa", 2, 3.0)
    write_run(tmp_path / "c", "gqa", 3, 5.0, code=NEW)
    runs = read_runs([tmp_path])[0]
    groups = group_runs(runs)
    assert sorted(len(members) for members in groups.values()) == [1, 2]
    assert set(groups) == {f"gqa code={run.code}" for run in runs}
    warning = "the runs differ in code that affects results: gptattn.attention.variants.gqa"
    assert differences_in_provenance(runs) == [warning]


def test_a_run_repeated_after_an_edit_replaces_the_old_one(tmp_path: Path) -> None:
    old = aged(write_run(tmp_path / "s" / "old", "gqa", 1, 2.0), 1e9)
    write_run(tmp_path / "s" / "new", "gqa", 1, 3.0, code=NEW)
    write_run(tmp_path / "s" / "mha", "mha", 1, 3.0)
    comparison = compared(tmp_path)
    assert [run.folder.name for run in comparison.runs] == ["mha", "new"]
    line = f"{old}: replaced by new (code of gptattn.attention.variants.gqa)"
    assert comparison.skipped == [line]


def test_a_run_without_a_record_is_unknown_and_not_averaged_with_known_ones(tmp_path: Path) -> None:
    (write_run(tmp_path / "a", "gqa", 1, 2.0) / "identity.json").unlink()
    write_run(tmp_path / "b", "gqa", 2, 3.0)
    runs = read_runs([tmp_path])[0]
    assert "gqa code=unknown" in group_runs(runs)
    line = "the code of 1 run is unknown: it was not recorded"
    assert line in differences_in_provenance(runs)


@pytest.mark.parametrize("weights", [("w1", "w2"), (None, None)])
def test_different_weights_with_one_name_are_two_rows(
    weights: tuple[str | None, str | None], tmp_path: Path
) -> None:
    for place, loss, digest in (("A", 2.587, weights[0]), ("B", 5.479, weights[1])):
        config = {"init_from": f"{place}/w"}
        write_run(tmp_path / place, "mha", 1, loss, config=config, making={"weights": digest})
    groups = group_runs(read_runs([tmp_path])[0])
    assert sorted(groups) == ["mha init_from=A/w", "mha init_from=B/w"]


def test_weights_that_changed_at_one_path_are_two_rows(tmp_path: Path) -> None:
    for seed, digest in enumerate(("0123456789", "9876543210"), start=1):
        making = {"weights": digest}
        write_run(tmp_path / digest, "mha", seed, 2.0, config={"init_from": "A/w"}, making=making)
    groups = group_runs(read_runs([tmp_path])[0])
    assert sorted(groups) == ["mha init_from=A/w 01234567", "mha init_from=A/w 98765432"]


def test_equal_weights_in_two_places_are_one_row(tmp_path: Path) -> None:
    for seed, place in enumerate(("A", "B"), start=1):
        config = {"init_from": f"{place}/w"}
        write_run(tmp_path / place, "mha", seed, 2.0, config=config, making={"weights": "w1"})
    assert list(group_runs(read_runs([tmp_path])[0])) == ["mha"]


@pytest.mark.parametrize("changed", ["", "+model-nano", ",model=nano"])
def test_runs_that_started_from_runs_of_their_own_seeds_are_one_row(
    changed: str, tmp_path: Path
) -> None:
    for seed in (1, 2):
        config = {"init_from": f"outputs/up/mha_s{seed}{changed}_{seed:06x}"}
        folder = tmp_path / f"r{seed}"
        write_run(folder, "gqa", seed, 2.0, config=config, making={"weights": f"w{seed}"})
    assert [len(members) for members in group_runs(read_runs([tmp_path])[0]).values()] == [2]


def test_after_an_edit_was_undone_the_run_of_the_current_code_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    aged(write_run(tmp_path / "s" / "today", "gqa", 1, 2.0), 1e9)
    write_run(tmp_path / "s" / "tried", "gqa", 1, 3.0, code=NEW)
    todays = "gptattn.compare.finished_runs.is_unchanged"
    monkeypatch.setattr(todays, lambda code: code["gptattn.attention.variants.gqa"] == "v0")
    (run,), (line,) = without_replaced(read_runs([tmp_path])[0])
    assert run.folder.name == "today"
    assert "tried: replaced by today" in line


def test_starting_weights_made_by_other_code_are_other_weights(tmp_path: Path) -> None:
    def child(name: str, seed: int, loss: float, original: str, origin: str) -> Path:
        config = {"init_from": f"outputs/up/{original}"}
        making = {"weights": original, "origin": origin}
        return write_run(tmp_path / "up" / name, "gqa", seed, loss, config=config, making=making)

    for seed in (1, 2):
        aged(child(f"old{seed}", seed, 2.0, f"mha_s{seed}_aaaaa{seed}", "o1"), 1e9)
    child("new1", 1, 5.0, "mha_s1_bbbbb1", "o2")
    kept, lines = without_replaced(read_runs([tmp_path])[0])
    assert sorted(run.folder.name for run in kept) == ["new1", "old2"]
    (line,) = lines
    assert "old1: replaced by new1 (other code made the weights in init_from" in line
    assert [len(members) for members in group_runs(kept).values()] == [1, 1]
