"""The short form of scripts/torture.py, which really kills, stops and starves processes."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from tortures import numbers
from tortures.bench import Bench, Result
from tortures.faults import Poison
from tortures.stops import kill, stop

from gptattn.settings.compose import CONF

SCRIPT = CONF.parent / "scripts" / "torture.py"


class Ended:
    """A fake process that has ended with this exit code and this output."""

    def __init__(self, code: int, line: str) -> None:
        self.code, self.line, self.pid = code, line, 0

    def poll(self) -> int:
        return self.code

    def wait(self) -> int:
        return self.code

    def send(self, number: int) -> None: ...

    def text(self) -> str:
        return self.line

    def complaint(self) -> str:
        return self.line


def broken(
    row: object, monkeypatch: pytest.MonkeyPatch, folder: Path, code: int, line: str = ""
) -> list[str]:
    """What a row reports as broken if each process only ends, with this exit code and output."""
    assert callable(row)
    (folder / "any" / "checkpoints").mkdir(parents=True)
    (folder / "any" / "checkpoints" / "step=1.safetensors").touch()
    monkeypatch.setattr(Bench, "start", lambda *args, **kwargs: Ended(code, line))
    monkeypatch.setattr(Bench, "after_rows", lambda *args: True)
    monkeypatch.setattr(Bench, "check_whole", lambda *args: None)
    one = SimpleNamespace(known_checkpoints=lambda: [Path("step=1.safetensors")])
    monkeypatch.setattr("tortures.stops.RunFolder", lambda run: one)
    monkeypatch.setattr("tortures.bench.fingerprint", lambda run: str(run))
    result = Result("row")
    row(Bench(folder, 1), 1, result)
    return result.broken


def test_a_row_sees_what_is_broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Every run ends with 0 whatever is done to it, and no two runs have the same fingerprint.
    found = broken(stop, monkeypatch, tmp_path / "a", 0)
    assert any("ended with 0 instead of 143" in line for line in found)
    assert any("it named another step" in line for line in found)
    assert any("differs from the undisturbed run" in line for line in found)
    found = broken(kill, monkeypatch, tmp_path / "b", 0)
    assert any("differs from the undisturbed run" in line for line in found)
    found = broken(numbers.nan, monkeypatch, tmp_path / "c", 1, "error: internal: ValueError")
    assert any("ended with 1" in line for line in found)
    late = "error: train/loss: is nan at step 60; try a lower optim.lr"
    found = broken(numbers.nan, monkeypatch, tmp_path / "d", 5, late)
    assert any("was seen at step 60" in line for line in found)
    assert Poison.PLACES[0] == "loss"
