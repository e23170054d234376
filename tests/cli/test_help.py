"""The help of every command fits a terminal of 80 columns."""

import re
from pathlib import Path

import pytest
from building import menu
from support import Call, command


def test_the_help_of_a_run_fits_80_columns(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path, "--help") == 0
    out = capfd.readouterr().out
    assert [line for line in out.splitlines() if len(line) > 80] == []
    listed = re.search(r"^attn: ((?:.|\n {4})*)$", out, re.MULTILINE)
    assert listed is not None
    assert re.split(r",\s+", listed[1]) == menu("attn")


@pytest.mark.parametrize("name", ["generate", "convert", "attention_map", "evaluate"])
def test_the_help_of_a_script_fits_80_columns(name: str, call: Call) -> None:
    code, out, err = call(name, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"{name} ")
    assert [line for line in out.splitlines() if len(line) > 80] == []
