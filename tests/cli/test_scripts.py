"""A new user's path: train, convert, generate from both; and the errors for mistakes on it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import Call, train

from gptattn.runs.checkpoint import write_checkpoint
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


def test_the_stop_text_ends_the_sample_and_is_not_shown(runs: dict[str, Path], call: Call) -> None:
    ask = ("generate", f"run={runs['char']}", "prompt=Line", "tokens=40", "temperature=0")
    whole = call(*ask)[1]
    made = whole.rstrip("\n").removeprefix("Line")
    stop = made[5:8]
    out = call(*ask, f"stop={stop}")[1]
    assert out.rstrip("\n") == "Line" + made[: made.index(stop)]


def test_prompts_of_a_file_go_on_together_as_each_does_alone(
    runs: dict[str, Path], tmp_path: Path, call: Call
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("Line\n\nLi\n", encoding="utf-8")
    greedy = ("temperature=0", "tokens=9")
    code, out, _ = call("generate", f"run={runs['char']}", f"prompts_file={file}", *greedy)
    assert code == 0
    alone = [
        call("generate", f"run={runs['char']}", f"prompt={prompt}", *greedy)[1].rstrip("\n")
        for prompt in ("Line", "Li")
    ]
    assert out.rstrip("\n").split("\n---\n") == alone


def test_a_full_context_slides_or_stops(runs: dict[str, Path], call: Call) -> None:
    ask = ("generate", f"run={runs['char']}", "prompt=Line", "tokens=40", "temperature=0.001")
    # The context of 16 holds 4 prompt tokens and 12 more; the full context predicts one more.
    assert len(call(*ask, "full=stop")[1].rstrip("\n")) <= 4 + 13
    assert len(call(*ask)[1]) > 30


MISTAKES = {
    "no run": (["run=nothing", "prompt=a"], 4, "error: run: nothing holds no run"),
    "empty prompt": (["prompt="], 3, "error: prompt: is empty"),
    "no prompt": ([], 2, "error: prompt: give prompt="),
    "unknown character": (["prompt=Q"], 3, "error: prompt: character 'Q'"),
    "negative temperature": (["prompt=L", "temperature=-1"], 2, "error: temperature: -1.0"),
    "no number": (["prompt=L", "tokens=many"], 2, "error: tokens: 'many' is a str; give a whole"),
    "unknown dtype": (
        ["prompt=L", "dtype=half"],
        2,
        "error: dtype: 'half' is unknown; one of auto",
    ),
    "no tokens": (["prompt=L", "tokens=0"], 2, "error: tokens: 0 is out of range; give 1 or more"),
    "misspelt": (["promt=L"], 2, "error: promt=L: is not a setting; did you mean prompt?"),
    "long prompt": (["prompt=" + "Line " * 9, "full=stop"], 3, "error: prompt: has 45 tokens"),
    "too many samples": (["prompt=L", "samples=1000000000000"], 8, "error: memory: "),
    "two prompts": (
        ["prompt=L", "prompts_file=none.txt"],
        2,
        "error: prompts_file: is given together with another prompt",
    ),
    "missing prompts": (["prompts_file=no.txt"], 3, "error: prompts_file: no.txt: No such file"),
    "missing file": (["prompt_file=none.txt"], 3, "error: prompt_file: none.txt: No such file"),
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
    ("damage", "said"),
    [
        ("cut", "cannot be read"),
        ("empty", "cannot be read"),
        ("missing", "has no checkpoint"),
        ("a pickle", "not a complete safetensors file"),
        ("foreign", "belongs to another model: Missing key"),
        ("config", "config.yaml"),
        ("other config", "belongs to another model: size mismatch"),
    ],
)
def test_a_damaged_run_is_one_line_with_exit_code_4(
    damage: str, said: str, tmp_path: Path, call: Call
) -> None:
    run = train(tmp_path, "attn=mqa", "validation.count=1")
    (file,) = (run / "checkpoints").glob("*.safetensors")
    config = run / "config.yaml"
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:2000])
    elif damage == "empty":
        file.write_bytes(b"")
    elif damage == "missing":
        file.unlink()
    elif damage == "a pickle":
        torch.save({"weights": {}}, file)
    elif damage == "foreign":
        write_checkpoint(file, {"state_dict": {"weight": torch.ones(3)}})
    elif damage == "config":
        config.write_text("seed: 1\n")
    else:
        config.write_text(config.read_text().replace("d_model: 16", "d_model: 32"))
    code, _, err = call("generate", f"run={run}", "prompt=L")
    assert code == 4
    (line,) = err.splitlines()
    assert re.search(said, line)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["to=gqaa"], 2, "error: to: 'gqaa' is unknown; did you mean gqa"),
        (["to=gqa", "to.num_kv_heads=3"], 2, "error: attn.num_kv_heads: num_kv_heads=3 must"),
        (["to=gqa", "to.heads=3"], 2, "error: to.heads: is not a setting of gqa"),
        (["to=gqa", "method=median"], 2, "error: method: 'median' is unknown; "),
        (["to=single_head"], 2, "error: to: layer 0: query heads of shape"),
        (["to=gqa", "to._target_=os.system"], 2, "error: to._target_: is not a setting of gqa"),
        (["to=gqa", "to.num_kv_heads"], 2, "error: to.num_kv_heads: has no value"),
        (["to=gqa", "to.num_kv_heads=[1"], 2, "error: to.num_kv_heads: '[1' cannot be read"),
        (
            ["to=hf", "to.num_kv_heads=1"],
            2,
            "error: to.num_kv_heads: is not a setting: hf has none",
        ),
        (["to=gqa", "path=x"], 2, "error: path: works only with from=gpt2"),
        (["to=gqa", "seed=-1"], 2, "error: seed: -1 is out of range; give 0 or more"),
        ([], 2, "error: to: is missing"),
    ],
)
def test_a_mistake_in_convert_is_one_line_and_writes_nothing(
    arguments: list[str], code: int, said: str, runs: dict[str, Path], tmp_path: Path, call: Call
) -> None:
    out = tmp_path / "out"
    result = call("convert", f"from={runs['byte']}", f"out={out}", *arguments)
    assert result[0] == code
    (line,) = result[2].splitlines()
    assert line.startswith(said)
    assert not out.exists()


@pytest.mark.parametrize("to", ["gqa", "hf"])
@pytest.mark.parametrize("holds", ["config.yaml", "config.json", "model.safetensors"])
def test_a_folder_that_holds_a_model_is_not_written_over(
    to: str, holds: str, runs: dict[str, Path], tmp_path: Path, call: Call
) -> None:
    (tmp_path / holds).write_bytes(b"mine")
    code, _, err = call("convert", f"from={runs['byte']}", f"to={to}", f"out={tmp_path}")
    assert code == 4
    assert err == f"error: out: {tmp_path} already holds a {holds}; give another folder\n"
    assert [(f.name, f.read_bytes()) for f in tmp_path.iterdir()] == [(holds, b"mine")]


def test_weights_that_are_not_finite_are_not_used(
    runs: dict[str, Path], tmp_path: Path, call: Call
) -> None:
    out = tmp_path / "out"
    assert call("convert", f"from={runs['byte']}", "to=mha", f"out={out}")[0] == 0
    weights = load_file(out / "model.safetensors")
    weights["norm.weight"][0] = float("nan")
    save_file(weights, out / "model.safetensors")
    for arguments in (
        ("generate", f"run={out}", "prompt=Line"),
        ("attention_map", f"run={out}", "prompt=Line"),
        ("convert", f"from={out}", "to=gqa", f"out={tmp_path / 'next'}"),
    ):
        code, text, err = call(*arguments)
        assert code == 5
        assert text == ""
        (line,) = err.splitlines()
        assert "norm.weight is not finite" in line
    assert not (tmp_path / "next").exists()


def test_a_reader_that_goes_early_is_no_error(runs: dict[str, Path]) -> None:
    script = CONF.parent / "scripts" / "generate.py"
    command = [sys.executable, str(script), f"run={runs['char']}", "prompt=Line", "tokens=9"]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")
