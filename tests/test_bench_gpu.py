"""The GPU benchmark runs: with tiny sizes on a CPU, every cell of every part."""

import json
import time
from pathlib import Path

import bench_gpu
import gpu.checks
import gpu.speeds
import gpu.whole_runs
import pytest
from building import settings

TINY = ("--device", "cpu", "--tiny")


@pytest.mark.slow
@pytest.mark.parametrize("part", bench_gpu.PARTS)
def test_every_cell_of_a_part_runs_and_holds(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The others differ in a number or a name.
    monkeypatch.setattr(gpu.speeds, "ROWS", (16,))
    monkeypatch.setattr(gpu.checks, "variant_names", lambda: ["gqa", "differential"])
    assert bench_gpu.main([part, *TINY, "--out", str(tmp_path)]) == 0
    cells = json.loads((tmp_path / "gpu.json").read_text())["parts"][part]
    assert list(cells) == list(bench_gpu.cells_of(part))
    assert not [name for name, cell in cells.items() if "error" in cell and "ok" not in cell]
    lines = (tmp_path / "gpu.md").read_text().splitlines()
    assert len(lines) == 2 + len(cells)
    assert all(line.count(" | ") == 3 for line in lines if "---" not in line)


def sleeps(lab: object) -> dict[str, object]:
    time.sleep(60)
    return {"ok": True}


def test_a_call_goes_on_where_the_last_one_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def cell(name: str, ok: bool = True) -> object:
        def run(lab: object) -> dict[str, object]:
            ran.append(name)
            if name == "raises":
                raise ValueError("of this cell")
            return {"ok": ok}

        return run

    made = {"first": cell("first"), "raises": cell("raises"), "fails": cell("fails", ok=False)}
    monkeypatch.setattr(bench_gpu, "cells_of", lambda part: made)
    call = ["check", *TINY, "--out", str(tmp_path)]
    assert bench_gpu.main([*call, "--seconds", "-1"]) == 0
    assert ran == []
    assert "the same call goes on" in capsys.readouterr().out
    assert bench_gpu.main(call) == 1
    assert bench_gpu.main(call) == 1
    assert ran == ["first", "raises", "fails"]
    assert bench_gpu.main([*call, "--again"]) == 1
    assert ran == ["first", "raises", "fails", "raises", "fails"]
    record = json.loads((tmp_path / "gpu.json").read_text())
    assert record["parts"]["check"]["raises"]["error"] == "ValueError: of this cell"
    assert "| check | fails | ok NO |" in (tmp_path / "gpu.md").read_text()


def test_a_call_ends_in_time_and_only_a_cell_that_had_all_of_it_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def half(lab: object) -> dict[str, object]:
        time.sleep(0.5)
        return {"ok": True}

    monkeypatch.setattr(bench_gpu, "cells_of", lambda part: {"half": half, "sleeps": sleeps})
    call = ["check", *TINY, "--out", str(tmp_path), "--seconds", "1"]
    assert bench_gpu.main(call) == 0
    assert "1 s are over before the end of sleeps; the same call" in capsys.readouterr().out
    assert bench_gpu.main(call) == 1
    cells = json.loads((tmp_path / "gpu.json").read_text())["parts"]["check"]
    assert cells["half"]["ok"]
    assert cells["sleeps"]["error"] == "takes more than 1 s"


def test_cells_of_another_device_torch_or_commit_are_not_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_gpu, "cells_of", lambda part: {"one": lambda lab: {"ok": True}})
    call = ["check", "--device", "cpu", "--out", str(tmp_path)]
    assert bench_gpu.main([*call, "--tiny"]) == 0
    assert bench_gpu.main([*call, "--tiny"]) == 0
    capsys.readouterr()
    assert bench_gpu.main(call) == 2
    said = f"error: --out: {tmp_path / 'gpu.json'} was made with tiny True; give another folder\n"
    assert capsys.readouterr().err == said
    monkeypatch.setattr(bench_gpu, "git_commit", lambda: "another")
    assert bench_gpu.main([*call, "--tiny"]) == 2


def test_a_missing_package_is_no_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(bench_gpu.PARTS, "check", ("gpu.missing", "cells"))
    assert bench_gpu.main(["check", *TINY, "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "error: No module named 'gpu.missing'\n"
    assert not (tmp_path / "gpu.json").exists()


def test_a_run_that_does_not_stop_does_not_show_that_resuming_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu.whole_runs, "train", lambda cfg, folder: None)
    with pytest.raises(RuntimeError, match="did not stop after step 8"):
        gpu.whole_runs.weights_after(settings(), tmp_path, 8)
