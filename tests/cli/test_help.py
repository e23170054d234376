"""The help of every command fits a terminal of 80 columns."""

import pytest
from support import Call


@pytest.mark.parametrize("name", ["generate", "convert", "attention_map", "evaluate", "prepare"])
def test_the_help_of_a_script_fits_80_columns(name: str, call: Call) -> None:
    code, out, err = call(name, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"{name} ")
    assert [line for line in out.splitlines() if len(line) > 80] == []
    assert call(name)[0] == 2
