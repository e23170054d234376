"""What the conversion of weights tells: its target, and what changes besides the weights."""

from pathlib import Path

import pytest
from support import Call, config, train


def test_the_target_has_the_name_that_is_recorded(tmp_path: Path, call: Call) -> None:
    run = train(tmp_path / "a", "attn=mha", "part=[qk_norm,gate]")
    code, out, _ = call("convert", f"from={run}", "to=mha_wrapper", f"out={tmp_path / 'b'}")
    assert code == 0
    assert out.startswith("mha+qk_norm+gate -> mha_wrapper+qk_norm+gate: logits")
    assert "attention settings" not in out


@pytest.mark.parametrize(
    ("given", "to", "said"),
    [
        (
            ["attn=gqa", "attn.window=4", "attn.scale=1.0"],
            ["to=mha"],
            "scale 1.0 -> null, window 4 -> null",
        ),
        (["attn=mha"], ["to=gqa", "to.window=4"], "window null -> 4"),
        (
            ["pattern=[sliding,gqa]", "model.num_layers=2"],
            ["to=gqa"],
            "pattern [sliding,gqa] -> null, sliding.window 0.25 -> null",
        ),
    ],
)
def test_settings_that_change_are_said_in_one_line(
    given: list[str], to: list[str], said: str, tmp_path: Path, call: Call
) -> None:
    run = train(tmp_path / "a", *given)
    code, out, _ = call("convert", f"from={run}", *to, f"out={tmp_path / 'b'}")
    assert code == 0
    assert out.splitlines()[1] == f"attention settings that change: {said}"
    record = config(tmp_path / "b")
    assert (record["pattern"], record["pattern_attn"]) == (None, None)
    assert record["choices"]["attn"] == to[0].removeprefix("to=")


def test_a_hugging_face_folder_says_how_it_is_given(tmp_path: Path, call: Call) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    code, _, err = call("convert", f"from={folder}", "to=gqa")
    said = f"{folder} is a Hugging Face folder; give from=llama path={folder}"
    assert (code, err) == (2, f"error: from: {said}\n")
