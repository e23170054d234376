"""Runs that begin from other weights, a run's or a Hugging Face folder's, and what they refuse."""

import json
import shutil
from pathlib import Path

import pytest
from llamas import assert_same_logits, theirs
from support import TEXT, check_job, refuses, save_untrained, series, summary, tiny, train
from transformers import AutoTokenizer, LlamaForCausalLM

from gptattn.runs.load import load_config, load_run
from gptattn.weights.families import LLAMA
from gptattn.weights.hugging_face import find_family, find_tokenizer


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_untrained(tmp_path_factory.mktemp("source"), "attn=mha")


@pytest.fixture(scope="module")
def llama(gpt2_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with GQA, a head of its own and a tokenizer that is GPT-2's kind."""
    folder = tmp_path_factory.mktemp("llama")
    theirs((2, 4, 2, 6, 64, 416, 29, 500.0, 1e-5, False)).save_pretrained(folder)
    shutil.copy(gpt2_files / "tokenizer.json", folder)
    return folder


def test_training_continues_from_the_weights_of_another_run(tmp_path):
    source = train(tmp_path / "a", "attn=mha", "optim.lr=0.01")
    # At a learning rate near 0 the wrapper must have the validation loss of the source.
    still = (f"init_from={source}", "budget.steps=1", "optim.lr=1e-12")
    target = train(tmp_path / "b", "attn=mha_wrapper", *still)
    before, after = (series(run, "val/loss")[-1][1] for run in (source, target))
    assert after == pytest.approx(before, abs=1e-5)
    assert summary(target)["init_from"] == str(source)


@pytest.mark.parametrize(
    ("overrides", "code", "said"),
    [
        (["init_from=none"], 4, "init_from: not a folder"),
        (["init_from=SOURCE/.."], 4, "init_from: no run"),
        (["tokenizer=char"], 2, "init_from: tokenizer=byte"),
        (
            ["position=none", "model.d_model=32", "model.context_length=8"],
            2,
            "init_from: position=learned model.d_model=16 model.context_length=16",
        ),
        (["match=params"], 2, "match: MLP"),
    ],
)
def test_weights_that_cannot_be_taken_over_are_refused(overrides, code, said, source, tmp_path):
    overrides = [f"init_from={source}", *(o.replace("SOURCE", str(source)) for o in overrides)]
    with refuses(said, code):
        check_job(tiny(tmp_path, *overrides))


def test_a_run_without_heads_says_so_before_anything_else(tmp_path):
    run = save_untrained(tmp_path / "a", "attn=gated_deltanet")
    with refuses("init_from: gated_deltanet has no per-head weights"):
        check_job([*tiny(tmp_path / "b", f"init_from={run}", "position=none"), "attn=mha"])


@pytest.mark.slow
def test_a_converted_llama_survives_the_round_trip_with_its_tokenizer(llama, tmp_path, call):
    same, out = tmp_path / "same", tmp_path / "out"
    to = ("to=gqa", "to.num_kv_heads=2", f"out={same}")
    assert call("convert", f"from={llama}", *to)[0] == 0
    assert call("convert", f"from={same}", "to=hf", f"out={out}")[0] == 0
    model = LlamaForCausalLM.from_pretrained(llama)
    assert_same_logits(LlamaForCausalLM.from_pretrained(out), model)
    assert_same_logits(load_run(same).model, model)
    ids = AutoTokenizer.from_pretrained(out)(TEXT[:300])["input_ids"]
    assert ids == load_run(same).tokenizer.encode(TEXT[:300], "text").tolist()


def test_a_tokenizer_of_another_kind_is_that_of_the_converted_model(llama, tmp_path, call):
    source = shutil.copytree(llama, tmp_path / "source")
    assert find_tokenizer(source, LLAMA) == "gpt2"
    node = json.loads((source / "tokenizer.json").read_text())
    node["model"]["byte_fallback"] = True  # as Llama 2's
    (source / "tokenizer.json").write_text(json.dumps(node))
    assert find_tokenizer(source, LLAMA) == "hf"
    assert call("convert", f"from={source}", "to=gqa")[0] == 0
    made = load_run(tmp_path / "source_to_gqa")
    assert made.cfg.choices["tokenizer"] == "hf"
    (source / "tokenizer.json").unlink()
    assert made.tokenizer.decode(made.tokenizer.encode(TEXT, "text")) == TEXT
    code, said, _ = call("convert", f"from={source}", "to=mha")
    assert code == 0
    assert "byte tokenizer" in said
    assert load_config(tmp_path / "source_to_mha").choices["tokenizer"] == "byte"


def test_a_model_that_we_do_not_have_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    with refuses("*: 'mistral'", 4):
        find_family(tmp_path)
