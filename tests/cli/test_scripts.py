"""A new user's path: convert, generate from both; and the errors for mistakes on it."""

import re
from pathlib import Path

import pytest
import torch
from support import check_job, config, tiny

from gptattn.data.tokenizer import ByteTokenizer
from gptattn.runs.load import save_model
from gptattn.settings.build import build_model

FIXED = ("tokens=12", "seed=3", "threads=1", "device=cpu")


def save(folder: Path, *overrides: str) -> Path:
    """Write a tiny model that was not trained."""
    torch.manual_seed(0)
    cfg = check_job(tiny(folder, *overrides))
    save_model(folder / "model", cfg, build_model(cfg, 256), ByteTokenizer())
    return folder / "model"


@pytest.fixture(scope="module")
def mha(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("scripts"), "attn=mha")


def test_a_new_users_path(mha, tmp_path, call):
    code, out, _ = call("convert", f"from={mha}", "to=gqa", f"out={tmp_path / 'gqa'}")
    assert code == 0
    assert "mha -> gqa: logits at most" in out
    # Keys and values of one layer: width 16, 16 tokens, float32; then with half the heads.
    assert "cache of a full context: 2,048 -> 1,024 bytes" in out
    for folder, cache in ((mha, "128 .* 2,048"), (tmp_path / "gqa", "64 .* 1,024")):
        code, out, err = call("generate", f"run={folder}", "prompt=The line", *FIXED)
        assert code == 0
        assert out.startswith("The line")
        assert re.search(rf"[\d,]+ tokens/s, \w+, cache {cache} for 1 x 16 tokens", err)
    half = call("generate", f"run={mha}", "prompt=Line", "dtype=bfloat16", *FIXED)[2]
    assert re.search(r"tokens/s, mha in bfloat16, cache 64 ", half)


def test_the_same_seed_gives_the_same_text_and_samples_differ(mha, call):
    ask = ("generate", f"run={mha}", "prompt=Line", "samples=3", *FIXED)
    first, second = call(*ask)[1], call(*ask)[1]
    assert first == second
    texts = first.split("\n---\n")
    assert len(texts) == len(set(texts)) == 3
    assert all(text.startswith("Line") for text in texts)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["prompt=" + "Line " * 9, "full=stop"], 3, "error: prompt: has 45 tokens"),
        (["prompt=L", "samples=1000000000000"], 8, "error: memory: "),
        (["prompt=L", "prompts_file=none.txt"], 2, "error: prompts_file: is given together with"),
    ],
)
def test_a_mistake_in_generate_is_one_line(arguments, code, said, mha, call):
    found, _, err = call("generate", f"run={mha}", *arguments)
    (line,) = err.splitlines()
    assert (found, line[: len(said)]) == (code, said)


@pytest.mark.parametrize(
    ("given", "to", "said"),
    [
        pytest.param(
            *(["attn=mha", "part=[qk_norm,gate]"], ["to=mha_wrapper"], None), marks=pytest.mark.slow
        ),
        (
            ["attn=gqa", "attn.window=4", "attn.scale=1.0"],
            ["to=mha"],
            "scale 1.0 -> null, window 4 -> null",
        ),
        pytest.param(
            *(["attn=mha"], ["to=gqa", "to.window=4"], "window null -> 4"), marks=pytest.mark.slow
        ),
        (
            ["pattern=[sliding,gqa]", "model.num_layers=2"],
            ["to=gqa"],
            "pattern [sliding,gqa] -> null, sliding.window 0.25 -> null",
        ),
    ],
)
def test_settings_that_a_conversion_changes_are_printed_and_recorded(
    given, to, said, tmp_path, call
):
    run = save(tmp_path / "a", *given)
    code, out, _ = call("convert", f"from={run}", *to, f"out={tmp_path / 'b'}")
    assert code == 0
    found = re.search("^attention settings that change: (.*)$", out, re.MULTILINE)
    assert (found and found[1]) == said
    record = config(tmp_path / "b")
    assert (record["pattern"], record["layers"]) == (None, {})
    assert record["choices"]["attn"] == to[0].removeprefix("to=")
    assert record["part"].keys() == ({"qk_norm", "gate"} if said is None else set())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["to=gqaa"], "error: to: 'gqaa' is unknown; did you mean gqa"),
        (["to=gqa", "to.num_kv_heads=3"], "error: attn.num_kv_heads: num_kv_heads=3 must"),
        (["to=single_head"], "error: to: layer 0: query heads of shape"),
        (["to=gqa", "to._target_=os.system"], "error: to._target_: is not a setting of gqa"),
        (["to=gqa", "to.num_kv_heads=[1"], "error: to.num_kv_heads: '[1' cannot be read"),
        (["to=hf", "to.num_kv_heads=1"], "error: to.num_kv_heads: is not a setting: hf has none"),
        (["to=gqa", "path=x"], "error: path: works only with from=gpt2"),
    ],
)
def test_a_mistake_in_convert_is_one_line_and_writes_nothing(arguments, said, mha, tmp_path, call):
    out = tmp_path / "out"
    code, _, err = call("convert", f"from={mha}", f"out={out}", *arguments)
    (line,) = err.splitlines()
    assert (code, line[: len(said)]) == (2, said)
    assert not out.exists()
