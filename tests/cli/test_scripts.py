"""A new user's path: train, convert, generate from both; and the errors for mistakes on it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import Call, train

from gptattn.runs.load import load_run
from gptattn.settings.compose import CONF


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An MHA run with the byte tokenizer and one with the char tokenizer, by tokenizer."""
    folder = tmp_path_factory.mktemp("runs")
    return {
        tokenizer: train(folder / tokenizer, "attn=mha", f"tokenizer={tokenizer}")
        for tokenizer in ("byte", "char")
    }


FIXED = ("tokens=12", "seed=3", "threads=1", "device=cpu")


def test_a_new_users_path(runs: dict[str, Path], tmp_path: Path, call: Call) -> None:
    code, out, _ = call("convert", f"from={runs['byte']}", "to=gqa", f"out={tmp_path / 'gqa'}")
    assert code == 0
    # Keys and values of one layer: width 16, 16 tokens, float32; then with half the heads.
    assert "cache of a full context: 2,048 -> 1,024 bytes" in out
    for folder, cache in ((runs["byte"], "128 .* 2,048"), (tmp_path / "gqa", "64 .* 1,024")):
        code, out, err = call("generate", f"run={folder}", "prompt=The line", *FIXED)
        assert code == 0
        assert out.startswith("The line")
        assert re.search(rf"[\d,]+ tokens/s, \w+, cache {cache} for 1 x 16 tokens", err)


def test_it_generates_in_bfloat16_too_and_says_so(runs: dict[str, Path], call: Call) -> None:
    ask = ("generate", f"run={runs['byte']}", "prompt=Line", *FIXED)
    assert re.search(r"tokens/s, mha in bfloat16, cache 64 ", call(*ask, "dtype=bfloat16")[2])
    code, _, err = call(*ask, "dtype=auto")
    assert code == 0
    assert re.search(r"tokens/s, mha in (bfloat16|float32), cache ", err)


def test_an_exact_conversion_generates_the_same_text(
    runs: dict[str, Path], tmp_path: Path, call: Call
) -> None:
    out = tmp_path / "wrapper"
    code, said, _ = call("convert", f"from={runs['char']}", "to=mha_wrapper", f"out={out}")
    assert code == 0
    assert "logits at most" in said
    texts = [
        call("generate", f"run={folder}", "prompt=Line", *FIXED)[1]
        for folder in (runs["char"], out)
    ]
    assert texts[0] == texts[1]
    assert (out / "model.safetensors").exists()


def test_gpt2_goes_out_and_comes_back(runs: dict[str, Path], tmp_path: Path, call: Call) -> None:
    assert call("convert", f"from={runs['byte']}", "to=hf", f"out={tmp_path / 'hf'}")[0] == 0
    back = ("from=gpt2", f"path={tmp_path / 'hf'}", "to=mha", f"out={tmp_path / 'back'}")
    assert call("convert", *back)[0] == 0
    old, new = load_run(runs["byte"]).model, load_run(tmp_path / "back").model
    ids = torch.arange(16)[None]
    with torch.no_grad():
        torch.testing.assert_close(new(ids), old(ids), rtol=0, atol=1e-6)


def test_the_same_seed_gives_the_same_text_and_samples_differ(
    runs: dict[str, Path], call: Call
) -> None:
    ask = ("generate", f"run={runs['byte']}", "prompt=Line", "samples=3", *FIXED)
    first, second = call(*ask)[1], call(*ask)[1]
    assert first == second
    texts = first.split("\n---\n")
    assert len(texts) == len(set(texts)) == 3
    assert all(text.startswith("Line") for text in texts)


MISTAKES = {
    "no run": (["run=nothing", "prompt=a"], 4, "error: run: nothing holds no run"),
    "no prompt": ([], 2, "error: prompt: give prompt="),
    "unknown character": (["prompt=Q"], 3, "error: prompt: character 'Q'"),
    "negative temperature": (["prompt=L", "temperature=-1"], 2, "error: temperature: -1.0"),
    "long prompt": (["prompt=" + "Line " * 9, "full=stop"], 3, "error: prompt: has 45 tokens"),
    "too many samples": (["prompt=L", "samples=1000000000000"], 8, "error: memory: "),
    "two prompts": (
        ["prompt=L", "prompts_file=none.txt"],
        2,
        "error: prompts_file: is given together with another prompt",
    ),
}


@pytest.mark.parametrize(("arguments", "code", "said"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_in_generate_is_one_line(
    arguments: list[str], code: int, said: str, runs: dict[str, Path], call: Call
) -> None:
    if not any(argument.startswith("run=") for argument in arguments):
        arguments = [f"run={runs['char']}", *arguments]
    result = call("generate", *arguments)
    assert result[0] == code
    (line,) = result[2].splitlines()
    assert line.startswith(said)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["to=gqaa"], "error: to: 'gqaa' is unknown; did you mean gqa"),
        (["to=gqa", "to.num_kv_heads=3"], "error: attn.num_kv_heads: num_kv_heads=3 must"),
        (["to=single_head"], "error: to: layer 0: query heads of shape"),
        (["to=gqa", "to._target_=os.system"], "error: to._target_: is not a setting of gqa"),
        (["to=gqa", "to.num_kv_heads"], "error: to.num_kv_heads: has no value"),
        (["to=gqa", "to.num_kv_heads=[1"], "error: to.num_kv_heads: '[1' cannot be read"),
        (["to=hf", "to.num_kv_heads=1"], "error: to.num_kv_heads: is not a setting: hf has none"),
        (["to=gqa", "path=x"], "error: path: works only with from=gpt2"),
    ],
)
def test_a_mistake_in_convert_is_one_line_and_writes_nothing(
    arguments: list[str], said: str, runs: dict[str, Path], tmp_path: Path, call: Call
) -> None:
    out = tmp_path / "out"
    result = call("convert", f"from={runs['byte']}", f"out={out}", *arguments)
    assert result[0] == 2
    (line,) = result[2].splitlines()
    assert line.startswith(said)
    assert not out.exists()


@pytest.mark.slow
def test_a_reader_that_goes_early_is_no_error(runs: dict[str, Path]) -> None:
    script = CONF.parent / "scripts" / "generate.py"
    command = [sys.executable, str(script), f"run={runs['char']}", "prompt=Line", "tokens=9"]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")
