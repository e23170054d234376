"""Reading run folders: damaged, odd or unfinished ones are reported and skipped."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runfolders import write_curve, write_run

from gptattn.compare.curves import read_curves
from gptattn.compare.finished_runs import read_runs
from gptattn.errors import DataError

DAMAGED_SUMMARIES = [
    "",
    "{",
    "[]",
    "null",
    '{"variant": "mha"}',
    '{"variant": "mha", "seed": 1, "data": {}, "hyperparameters": {}}',
    "\x00",
]
WRONG_VALUES: dict[str, Any] = {
    "seed": "one",
    "variant": 7,
    "metrics": [1, 2],
    "data": None,
    "hyperparameters": {},
    "status": "running",
}


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


@pytest.mark.parametrize("content", DAMAGED_SUMMARIES)
def test_a_damaged_summary_is_named_and_skipped(content: str, tmp_path: Path, bad: Path) -> None:
    (bad / "summary.json").write_text(content)
    only_the_good_one_is_read(tmp_path, bad)


@pytest.mark.parametrize("key", WRONG_VALUES)
def test_a_summary_with_a_wrong_value_is_named_and_skipped(
    key: str, tmp_path: Path, bad: Path
) -> None:
    summary = json.loads((bad / "summary.json").read_text())
    (bad / "summary.json").write_text(json.dumps(summary | {key: WRONG_VALUES[key]}))
    only_the_good_one_is_read(tmp_path, bad)


@pytest.mark.parametrize("loss", ["NaN", "Infinity", "null", '"2.0"', "1e300", "1" + "0" * 400])
def test_a_loss_that_is_no_finite_number_is_named_and_skipped(
    loss: str, tmp_path: Path, bad: Path
) -> None:
    text = (bad / "summary.json").read_text()
    (bad / "summary.json").write_text(text.replace('"val/loss": 2.0', f'"val/loss": {loss}'))
    only_the_good_one_is_read(tmp_path, bad)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "- 1",
        "text",
        "a: !!python/object/apply:os.system [true]",
        "a: \t\x01",
    ],
    ids=range(6),
)
def test_a_damaged_config_is_named_and_skipped(content: str, tmp_path: Path, bad: Path) -> None:
    (bad / "config.yaml").write_text(content)
    only_the_good_one_is_read(tmp_path, bad)


def test_a_run_that_is_not_finished_is_named_and_skipped(tmp_path: Path, bad: Path) -> None:
    (bad / "summary.json").unlink()
    only_the_good_one_is_read(tmp_path, bad, "not finished")


@pytest.mark.parametrize("file", ["summary.json", "config.yaml", "metrics.jsonl"])
def test_what_may_not_be_read_is_named_and_skipped(
    file: str, tmp_path: Path, bad: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_curve(bad, 2.0)
    opened = os.open, Path.open

    def refusing(open_it: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(path: Any, *args: Any, **kwargs: Any) -> Any:
            # Not by file permissions: tests may run as root, who ignores them.
            if path == bad / file:
                raise PermissionError(13, "Permission denied", str(path))
            return open_it(path, *args, **kwargs)

        return wrapped

    monkeypatch.setattr(os, "open", refusing(opened[0]))
    monkeypatch.setattr(Path, "open", refusing(opened[1]))
    if file == "metrics.jsonl":
        assert read_curves(bad)[1] == f"{bad}: metrics.jsonl: Permission denied: no curves"
    else:
        only_the_good_one_is_read(tmp_path, bad, "Permission denied")


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


def test_loops_of_links_have_an_end_and_no_run_is_read_twice(tmp_path: Path) -> None:
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
