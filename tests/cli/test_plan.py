"""The command that works out what training on many GPUs would take."""

import re

import pytest
from support import Call

SMALL = ("model=tiny", "model.num_layers=2", "vocab=100")


def test_a_row_for_each_number_of_machines(call: Call) -> None:
    code, out, _ = call("plan", *SMALL, "machines=1x1,2x4", "tokens=1e6", "batch=1024")
    assert code == 0
    assert re.search(r"^[\d,]+ parameters, [\d.]+ MFLOPs per token", out)
    rows = [line.split()[1] for line in out.splitlines() if line.startswith("│")]
    assert rows == ["1", "8"]


@pytest.mark.parametrize(
    ("argument", "line"),
    [
        ("machines=", "machines: is empty; give 1x1,64x8, for example"),
        ("machines=8", "machines: '8' is not NODESxGPUS; give 64x8, for example"),
        ("precision=fp8", "precision: fp8 is not known; give bf16 or float32"),
        ("batch=100", "batch: 100 tokens are less than a row for each of 8 GPUs; give at least"),
        ("mfu=1.5", "mfu: "),
        ("attn=nothing", "attn: "),
    ],
)
def test_a_mistake_is_one_line(argument: str, line: str, call: Call) -> None:
    code, out, err = call("plan", *SMALL, "machines=1x8", argument)
    assert (code, len(err.splitlines())) == (2, 1)
    assert err.startswith(f"error: {line}")
    assert "│" not in out
