"""Reading run folders: damaged, odd or unfinished ones are reported and skipped."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from runfolders import write_run

from gptattn.compare.curves import read_curves
from gptattn.compare.finished_runs import read_runs
from gptattn.errors import DataError

DAMAGED = {
    "summary.json": ["", "{", "[]", "null", '{"variant": "mha"}', "\x00"],
    "config.yaml": ["", "{", "- 1", "text", "a: !!python/object/apply:os.system [true]", "a: \x01"],
}
WRONG_VALUES: list[dict[str, Any]] = [
    {"seed": "one"},
    {"variant": 7},
    {"metrics": [1, 2]},
    {"data": None},
    {"data": {}},
    {"hyperparameters": {}},
    {"status": "running"},
    *({"metrics": {"val/loss": x}} for x in (math.nan, math.inf, None, "2.0", 1e300, 10**400)),
]


def only_the_good_one_is_read(tmp_path: Path, bad: Path, reason: str = "") -> None:
    runs, skipped = read_runs([tmp_path])
    assert [run.folder.name for run in runs] == ["good"]
    (line,) = skipped
    assert line.startswith(f"{bad}: ")
    assert reason in line
    assert "\n" not in line


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    """A run for the test to damage, next to a good one."""
    write_run(tmp_path / "good", "mha", 1, 2.0)
    return write_run(tmp_path / "bad", "mha", 2, 2.0)


@pytest.mark.parametrize(
    ("file", "content"), [(file, text) for file, texts in DAMAGED.items() for text in texts]
)
def test_a_damaged_file_is_named_and_its_run_skipped(
    file: str, content: str, tmp_path: Path, bad: Path
) -> None:
    (bad / file).write_text(content)
    only_the_good_one_is_read(tmp_path, bad)


@pytest.mark.parametrize("wrong", WRONG_VALUES, ids=str)
def test_a_summary_with_a_wrong_value_is_named_and_skipped(
    wrong: dict[str, Any], tmp_path: Path, bad: Path
) -> None:
    summary = json.loads((bad / "summary.json").read_text())
    (bad / "summary.json").write_text(json.dumps(summary | wrong))
    only_the_good_one_is_read(tmp_path, bad)


def test_runs_without_a_result_are_named_and_skipped(tmp_path: Path, bad: Path) -> None:
    (bad / "summary.json").unlink()
    only_the_good_one_is_read(tmp_path, bad, "not finished")
    (bad / "model.safetensors").write_bytes(b"")
    only_the_good_one_is_read(tmp_path, bad, "converted weights that were not trained")


def test_a_file_that_cannot_be_read_is_named_with_the_systems_reason(
    tmp_path: Path, bad: Path
) -> None:
    # Not by file permissions: tests may run as root, who ignores them.
    (bad / "metrics.jsonl").mkdir()
    assert read_curves(bad)[1] == f"{bad}: metrics.jsonl: Is a directory: no curves"
    (bad / "summary.json").unlink()
    (bad / "summary.json").mkdir()
    only_the_good_one_is_read(tmp_path, bad, "Is a directory")


def test_a_folder_that_cannot_be_listed_is_named_and_skipped(
    tmp_path: Path, bad: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scandir = os.scandir

    def refusing(path: Any) -> Any:
        if Path(path) == bad:
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    only_the_good_one_is_read(tmp_path, bad, "Permission denied")


def test_loops_of_links_end_and_no_run_is_read_twice(tmp_path: Path) -> None:
    run = write_run(tmp_path / "sweep" / "a", "mha", 1, 2.0)
    (run / "loop").symlink_to(tmp_path)
    (tmp_path / "other").symlink_to(tmp_path / "sweep")
    (tmp_path / "itself").symlink_to(tmp_path / "itself")
    (tmp_path / "nowhere").symlink_to(tmp_path / "none")
    runs, skipped = read_runs([tmp_path, tmp_path / "sweep", run])
    assert len(runs) == 1
    assert skipped == []


def test_the_copy_of_hydra_is_not_taken_for_a_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", "mha", 1, 2.0)
    (run / ".hydra").mkdir()
    (run / ".hydra" / "config.yaml").write_text("{}")
    assert len(read_runs([tmp_path])[0]) == 1
    assert read_runs([tmp_path])[1] == []


def test_folders_without_a_finished_run_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no finished run"):
        read_runs([tmp_path])
    with pytest.raises(DataError, match="is not a folder"):
        read_runs([tmp_path / "none"])
    write_run(tmp_path / "a", "mha", 1, 2.0)
    (tmp_path / "a" / "summary.json").unlink()
    with pytest.raises(DataError, match=r"1 skipped, such as .*not finished"):
        read_runs([tmp_path])
