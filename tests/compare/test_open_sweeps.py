"""What the report says of a sweep that is not done."""

from pathlib import Path

import pytest
from reporting import compared, report
from runfolders import write_run

from gptattn.compare.report import describe_open_sweeps, page_text
from gptattn.machine.lock import hold_lock
from gptattn.runs.folder import RunFolder
from gptattn.runs.sweep_states import SWEEP_LOCK, write_planned


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Two runs of mha are done, one of gqa has failed, two of mqa are planned."""
    folder = tmp_path / "sweep"
    names = ["mha_s1_000001", "mha_s2_000002", "gqa_s1_000003", "mqa_s1_000004", "mqa_s2_000005"]
    for seed, name in enumerate(names[:2], start=1):
        write_run(folder / name, "mha", seed, 2.0)
    failed = folder / names[2]
    failed.mkdir()
    RunFolder(failed).write_failure(5, "loss is NaN")
    write_planned(folder, names)
    return folder


def test_open_runs_of_a_sweep_are_counted_by_variant(sweep: Path) -> None:
    reason = "gqa_s1_000003 failed: loss is NaN"
    stopped = "2 never ended, as the sweep was stopped (mqa 2)"
    expected = f"{sweep}: 2 of 5 runs are done; {stopped}; 1 failed (gqa 1)"
    assert describe_open_sweeps([sweep.parent]) == [expected, reason]
    with hold_lock(sweep / SWEEP_LOCK, "sweep", "busy"):
        expected = f"{sweep}: 2 of 5 runs are done; 2 planned (mqa 2); 1 failed (gqa 1)"
        assert describe_open_sweeps([sweep]) == [expected, reason]


def test_the_command_and_the_page_report_open_runs(
    sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report(sweep, "--no-files")
    assert "open: " in capsys.readouterr().err
    comparison = compared(sweep)
    page = page_text(comparison, [()], [], describe_open_sweeps([sweep]))
    assert "2 of 5 runs are done" in page


def test_a_finished_sweep_is_not_mentioned(tmp_path: Path) -> None:
    write_run(tmp_path / "mha_s1_000001", "mha", 1, 2.0)
    write_planned(tmp_path, ["mha_s1_000001"])
    assert describe_open_sweeps([tmp_path]) == []
