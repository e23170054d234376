"""gptattn from Python: docs/library.md is right, and its runs equal those of the command."""

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
from support import command, config, losses, process_state, tiny

from gptattn.errors import RunFolderError
from gptattn.settings.compose import settings
from gptattn.training.run import train

PAGE = Path(__file__).parents[1] / "docs" / "library.md"


def test_the_pages_blocks_run_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    known: dict[str, Any] = {"__name__": "page"}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    with process_state():
        for block in blocks:
            exec(compile(block, PAGE.name, "exec"), known)
    # Only what the page's code prints: the training itself prints nothing.
    out, err = capfd.readouterr()
    assert len(blocks) == 4
    assert re.findall(r"^(mha|gqa) \d\.\d+$", out, re.MULTILINE) == ["mha", "gqa"]
    assert "\nThe class" in out
    runs = known["runs"].sort_values("variant")
    assert [*zip(runs["variant"], runs["cost/kv_bytes_per_token"], strict=True)] == [
        ("gqa", 512),
        ("mha", 1024),
    ]
    assert "tokens/s" not in out
    assert err == ""


def test_a_run_from_python_is_the_commands(tmp_path: Path) -> None:
    given = tiny(tmp_path, "attn=gqa", "model.num_layers=2")
    assert command(tmp_path, *given, "run_dir=by_command") == 0
    cfg = settings(given)
    with process_state(), contextlib.chdir(tmp_path):
        train(cfg, "mine")
        with pytest.raises(RunFolderError, match="already holds a run"):
            train(cfg, "mine")
    assert config(tmp_path / "mine") == config(tmp_path / "by_command")
    assert losses(tmp_path / "mine") == losses(tmp_path / "by_command") != []


def test_settings_leave_nothing_of_one_call_to_the_next(tmp_path: Path) -> None:
    book = tmp_path / "a,b=c.txt"
    book.touch()
    one = settings(["attn=gqa", "attn.num_kv_heads=1", "data=text", f"data.path='{book}'"])
    assert (one.variant, one.attn["num_kv_heads"]) == ("gqa", 1)
    assert one.data["path"] == str(book)
    assert settings().variant == "mha"
    assert settings(["attn=gqa"]).attn["num_kv_heads"] == 2
