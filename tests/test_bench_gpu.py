"""The GPU benchmark runs: with tiny sizes on a CPU, every cell of every part."""

import json
from pathlib import Path

import bench_gpu
import gpu.checks
import gpu.speeds
import pytest

pytestmark = pytest.mark.slow
TINY = ("--device", "cpu", "--tiny")


@pytest.mark.parametrize("part", bench_gpu.PARTS)
def test_every_cell_of_a_part_runs_and_holds(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The others differ in a number or a name.
    monkeypatch.setattr(gpu.speeds, "ROWS", (16,))
    monkeypatch.setattr(gpu.checks, "variant_names", lambda: ["gqa", "differential"])
    assert bench_gpu.main([part, *TINY, "--out", str(tmp_path)]) == 0
    cells = json.loads((tmp_path / "gpu.json").read_text())[part]
    assert list(cells) == list(bench_gpu.cells_of(part))
    assert not [name for name, cell in cells.items() if "error" in cell and "ok" not in cell]
    lines = (tmp_path / "gpu.md").read_text().splitlines()
    assert len(lines) == 2 + len(cells)
    assert all(line.count(" | ") == 3 for line in lines if "---" not in line)


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
    assert record["check"]["raises"]["error"] == "ValueError: of this cell"
    assert "| check | fails | ok NO |" in (tmp_path / "gpu.md").read_text()
