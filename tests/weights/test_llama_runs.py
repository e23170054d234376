"""What is done with a Llama: convert it, generate from it, train it further, and write it again."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from building import build_gpt
from llamas import assert_same_logits, change, theirs
from support import TEXT, Call, bpe, command, series, tiny, train
from transformers import AutoTokenizer, LlamaForCausalLM

from gptattn.errors import CheckpointError, ConfigError
from gptattn.runs.load import load_config, load_run
from gptattn.weights import gpt2, llama
from gptattn.weights.families import family_of


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with GQA, a head of its own and a tokenizer that is GPT-2's kind."""
    folder = tmp_path_factory.mktemp("llama")
    theirs((2, 4, 2, 6, 64, 416, 29, 500.0, 1e-5, False)).save_pretrained(folder)
    shutil.copy(bpe(folder.parent / "bpe") / "tokenizer.json", folder)
    return folder


def test_a_llama_converts_generates_and_goes_out_again(
    checkpoint: Path, tmp_path: Path, call: Call
) -> None:
    run, out = tmp_path / "as_mqa", tmp_path / "out"
    code, said, _ = call("convert", "from=llama", f"path={checkpoint}", "to=mqa", f"out={run}")
    assert code == 0
    assert "cache of a full context: 12,288 -> 6,144 bytes" in said
    cfg = load_config(run)
    assert (cfg.choices["block"], cfg.block.tied_head, cfg.block.norm_eps) == ("llama", False, 1e-5)
    assert (cfg.position["base"], cfg.model.qkv_bias, cfg.model.d_mlp) == (500.0, False, 29)
    ask = ("prompt=Line 001", "tokens=20", "temperature=0", "threads=1", "device=cpu")
    assert call("generate", f"run={run}", *ask)[1].startswith("Line 001")
    # To as many heads as before and out: the logits and the tokens are the source's.
    same = tmp_path / "same"
    to = ("to=gqa", "to.num_kv_heads=2", f"out={same}")
    assert call("convert", "from=llama", f"path={checkpoint}", *to)[0] == 0
    assert call("convert", f"from={same}", "to=hf", f"out={out}")[0] == 0
    source = LlamaForCausalLM.from_pretrained(checkpoint)
    assert_same_logits(LlamaForCausalLM.from_pretrained(out), source)
    assert_same_logits(load_run(same).model, source)
    ids = AutoTokenizer.from_pretrained(out)(TEXT[:300])["input_ids"]
    assert ids == load_run(same).tokenizer.encode(TEXT[:300], "text").tolist()


def test_a_llama_trains_on_with_the_settings_that_the_error_names(
    checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    still = ["optim.lr=1e-12", "budget.steps=1", "attn=gqa", "attn.num_kv_heads=2"]
    arguments = tiny(tmp_path, f"init_from={checkpoint}", *still)
    assert command(tmp_path, *arguments) == 2
    line = capfd.readouterr().err
    assert re.fullmatch(
        r"error: init_from: \S+ differs from this run; give tokenizer=gpt2 block=llama "
        r"position=rope model.num_layers=2 model.d_model=24 model.d_mlp=29 block.tied_head=false "
        r"model.qkv_bias=false block.norm_eps=1e-05 position.base=500.0\n",
        line,
    ), line
    arguments += re.findall(r"[\w.]+=\S+", line.partition("; give ")[2])
    assert command(tmp_path, *arguments) == 2
    line = capfd.readouterr().err
    assert line.endswith("give model.vocab_size=416\n"), line
    # The context stays shorter than the source's: rotary positions have no weights.
    assert command(tmp_path, *arguments, "model.vocab_size=416") == 0
    (run,) = (file.parent for file in tmp_path.rglob("summary.json"))
    saved = load_run(run)
    assert saved.model.context_length == 16
    # The last tenth of the bytes is held out, after one token of context.
    whole = TEXT.encode()
    held = len(whole) - round(len(whole) * 0.1)
    both = [saved.tokenizer.encode(part.decode(), "text") for part in (whole[:held], whole[held:])]
    tail = torch.tensor([both[0][-1], *both[1]], dtype=torch.int64)
    source, total = LlamaForCausalLM.from_pretrained(checkpoint), 0.0
    for start in range(0, len(tail) - 1, 16):
        here, after = tail[start : start + 16], tail[start + 1 : start + 17]
        with torch.no_grad():
            logits = source(here[None]).logits[0, : len(after)]
        total += torch.nn.functional.cross_entropy(logits, after, reduction="sum").item()
    found = series(run, "val/loss")[-1][1]
    assert found == pytest.approx(total / (len(tail) - 1), abs=1e-4)


MISTAKES = [
    (["position.base=10000.0"], r"give position\.base=500\.0$"),
    (["position=none"], r"give position=rope position\.base=500\.0$"),
    (["position.fraction=0.34"], r"give position\.fraction=1\.0$"),
    (["block.norm_eps=1e-6"], r"give block\.norm_eps=1e-05$"),
    (["block.tied_head=true"], r"give block\.tied_head=false$"),
    (["model.mlp=none"], r"give model\.mlp=swiglu$"),
    (["block=gpt2"], r"give block=llama block\.norm_eps=1e-05 block\.tied_head=false$"),
    (["model.context_length=65"], r"give model\.context_length=64$"),
    (["attn=gqa", "attn.num_kv_heads=4", "model.qkv_bias=true"], r"give model\.qkv_bias=false$"),
]


@pytest.mark.parametrize(("overrides", "said"), MISTAKES)
def test_another_block_or_base_than_the_sources_is_one_line(
    overrides: list[str],
    said: str,
    checkpoint: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    fitting = [
        *("block=llama", "tokenizer=gpt2", "position=rope", "position.base=500.0"),
        *("model.num_layers=2", "model.d_model=24", "model.d_mlp=29", "model.vocab_size=416"),
        *("block.norm_eps=1e-5", "block.tied_head=false", "model.qkv_bias=false"),
    ]
    names = {override.partition("=")[0] for override in overrides}
    dropped = {"position.base"} if "position" in names else set()
    kept = [o for o in fitting if o.partition("=")[0] not in names | dropped]
    capfd.readouterr()
    arguments = tiny(tmp_path, f"init_from={checkpoint}", *kept, *overrides)
    assert command(tmp_path, *arguments) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert re.search(said, line), line


def test_a_tokenizer_of_another_kind_is_not_claimed(
    checkpoint: Path, tmp_path: Path, call: Call, capfd: pytest.CaptureFixture[str]
) -> None:
    source = shutil.copytree(checkpoint, tmp_path / "source")
    assert llama.has_tokenizer(source)
    node = json.loads((source / "tokenizer.json").read_text())
    node["model"]["byte_fallback"] = True  # as Llama 2's
    (source / "tokenizer.json").write_text(json.dumps(node))
    assert not llama.has_tokenizer(source)
    code, said, _ = call("convert", "from=llama", f"path={source}", "to=gqa")
    assert code == 0
    assert "no tokenizer that tokenizer=gpt2 reads found; recorded the byte tokenizer" in said
    assert load_config(tmp_path / "source_to_gqa").choices["tokenizer"] == "byte"
    # Files that do not say how the text is split may be those of any tokenizer.
    shutil.copy(bpe(tmp_path / "bpe") / "vocab.json", source)
    shutil.copy(tmp_path / "bpe" / "merges.txt", source)
    (source / "tokenizer.json").unlink()
    assert not llama.has_tokenizer(source)


def test_a_llama_is_not_read_as_a_gpt2_nor_written_as_one(
    checkpoint: Path, tmp_path: Path, call: Call
) -> None:
    code, _, err = call("convert", "from=gpt2", f"path={checkpoint}", "to=gqa")
    assert (code, len(err.splitlines())) == (4, 1)
    assert "model_type is 'llama', but must be 'gpt2'" in err
    with pytest.raises(ConfigError, match="train with block=gpt2"):
        gpt2.write(tmp_path / "out", build_gpt("block=llama", "attn=mha", "model.d_model=36"))
    mistral = shutil.copytree(checkpoint, tmp_path / "mistral")
    change(mistral / "config.json", model_type="mistral")
    with pytest.raises(CheckpointError, match="'mistral', but must be one of gpt2, llama"):
        family_of(mistral)


def test_a_run_with_blocks_of_llama_starts_from_another_with_fewer_heads(tmp_path: Path) -> None:
    block = ["block=llama", "block.tied_head=false", "model.num_layers=2"]
    source = train(tmp_path / "a", *block, "attn=mha", "budget.steps=30", "optim.lr=0.01")
    still = [*block, f"init_from={source}", "budget.steps=1", "optim.lr=1e-12"]
    same = train(tmp_path / "b", *still, "attn=gqa", "attn.num_kv_heads=4")
    before, after = (series(run, "val/loss")[-1][1] for run in (source, same))
    assert after == pytest.approx(before, abs=1e-5)
    fewer = train(tmp_path / "c", *still, "attn=mqa", "init_method=first")
    assert series(fewer, "val/loss")[-1][1] > before


def test_a_context_is_stretched_and_a_stretched_one_stays_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = train(tmp_path / "a", "block=llama")
    stretched = ["block=llama", f"init_from={source}", "model.context_length=32"]
    longer = train(tmp_path / "b", *stretched, "position.stretch=2.0")
    capfd.readouterr()
    for given, said in (
        (stretched, "give model.context_length=16\n"),
        ([*stretched, f"init_from={longer}"], "give position.stretch=2.0\n"),
    ):
        assert command(tmp_path / "c", *tiny(tmp_path / "c", *given)) == 2
        assert capfd.readouterr().err.endswith(said)
