"""Runs in lm-evaluation-harness, against transformers' models in the harness's own adapter."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from llamas import shake
from support import bpe, refuses, save_untrained, summary, train
from tokenizers import decoders
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from gptattn.attention.foreign import ForeignAttention
from gptattn.data.bpe import ByteLevelBPE
from gptattn.runs.folder import RunFolder
from gptattn.runs.load import SavedRun, load_run
from gptattn.weights.hugging_face import find_family, load_checkpoint

pytest.importorskip("lm_eval", reason="without the extra lm-eval")

from lm_eval.api.instance import Instance

from gptattn.evaluate import harness
from gptattn.evaluate.harness import HarnessModel

T, VOCABULARY = 32, 300
LONG = "Line 007: naïve π ≈ 22.000. The end. It's we'll " * 4
GPT2 = GPT2Config(n_layer=2, n_head=4, n_embd=20, n_positions=T, vocab_size=VOCABULARY)
LLAMA = LlamaConfig(
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=3,
    hidden_size=60,
    intermediate_size=37,
    max_position_embeddings=T,
    vocab_size=VOCABULARY,
)


class Plain(nn.Module):
    """A module that knows nothing of caches and positions."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def request(*arguments: Any) -> Instance:
    return Instance(request_type="loglikelihood", doc={}, arguments=arguments, idx=0)


@pytest.fixture(params=["gpt2", "llama", "foreign"])
def both(request, tmp_path) -> tuple[HarnessModel, Any]:
    """One model with random weights, in our adapter and in the harness's HFLM."""
    transformers = pytest.importorskip("lm_eval.models.huggingface", reason="needs accelerate")
    from transformers import PreTrainedTokenizerFast

    theirs = LlamaForCausalLM(LLAMA) if request.param == "llama" else GPT2LMHeadModel(GPT2)
    folder = bpe(tmp_path / "model", VOCABULARY)
    shake(theirs.eval()).save_pretrained(folder)
    cfg, ours = load_checkpoint(folder, find_family(folder))
    if request.param == "foreign":
        for block in ours.layers():
            d = block.attention.d_in
            block.attention = ForeignAttention(Plain(block.attention), d, d, T)
    saved = SavedRun(folder, cfg, ours.eval(), ByteLevelBPE(str(folder)), folder)
    end = "<|endoftext|>"
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token=end, eos_token=end, pad_token=end
    )
    tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    theirs.generation_config.eos_token_id = tokenizer.eos_token_id
    hflm = transformers.HFLM(theirs, tokenizer=tokenizer, batch_size=3, max_length=T)
    return HarnessModel(saved), hflm


def test_log_likelihoods_are_those_of_transformers(both):
    ours, theirs = both
    endings = [" The end.", " a", " It's", " 22.000. naïve"]
    contexts = [*(LONG[:cut] for cut in (1, 9, 40, 120)), "Line 007: "]
    requests = [request(context, ending) for context in contexts for ending in endings]
    requests += [request("", LONG[:30]), request("", " b"), request(LONG, LONG[:12])]
    found, expected = ours.loglikelihood(requests), theirs.loglikelihood(requests)
    likelihoods = [x for x, _ in expected]
    assert len({*likelihoods}) == len(requests)
    assert [x for x, _ in found] == pytest.approx(likelihoods, rel=1e-5, abs=1e-5)
    # What greedy decoding adds to a context is greedy.
    texts = ours.generate_until([request(c, {"max_gen_toks": 1, "until": []}) for c in contexts])
    greedy = [request(c.rstrip(), text) for c, text in zip(contexts, texts, strict=True)]
    found += ours.loglikelihood(greedy)
    expected += theirs.loglikelihood(greedy)
    assert [same for _, same in found] == [same for _, same in expected]
    assert {same for _, same in found} == {True, False}


def test_rolling_log_likelihoods_are_those_of_transformers(both):
    ours, theirs = both
    requests = [request(LONG[:cut]) for cut in (1, 12, 60, 150)]
    lengths = [len(ours.tok_encode(one.args[0])) for one in requests]
    assert lengths[1] < T < 2 * T < lengths[-1]
    expected = theirs.loglikelihood_rolling(requests)
    assert ours.loglikelihood_rolling(requests) == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_greedy_text_is_that_of_transformers(both):
    ours, theirs = both
    texts = [LONG[:cut] for cut in (1, 9, 40, 120)] + ["a", "The", "We"]
    kinds = [{"until": [], "max_gen_toks": 9}, {"until": ["e", "0"], "max_gen_toks": 5}]
    requests = [request(text, kind) for text in texts for kind in kinds]
    found = ours.generate_until(requests)
    assert found == theirs.generate_until(requests)
    assert len({*found}) > 5


def reads(model: nn.Module) -> list[tuple[int, int]]:
    """A list that gets rows and tokens of every pass through the model."""
    shapes: list[tuple[int, int]] = []
    model.token_embedding.register_forward_hook(lambda _, given, __: shapes.append(given[0].shape))
    return shapes


def test_a_context_is_read_once_for_all_its_continuations_and_the_longest_first(tmp_path, monkeypatch):
    folder = save_untrained(tmp_path, "tokenizer=byte", "model.context_length=64")
    model = HarnessModel(load_run(folder))
    read = reads(model.model)
    model.loglikelihood([request("a" * 20, " " + "b" * n) for n in (1, 2, 3, 4)])
    # The last token of the context, and five of the longest continuation but the last.
    assert read == [(1, 19), (4, 5)]
    read.clear()
    found = model.loglikelihood([request("a" * n, " b") for n in (3, 60, 30)])
    assert read == [(3, 61)]
    read.clear()
    monkeypatch.setattr(harness, "TOKENS_AT_A_TIME", 64)
    alone = model.loglikelihood([request("a" * n, " b") for n in (3, 60, 30)])
    assert read == [(1, 61), (2, 31)]
    assert [x for x, _ in alone] == pytest.approx([x for x, _ in found], abs=1e-5)


def test_what_the_model_cannot_answer_is_refused_in_one_line(tmp_path):
    model = HarnessModel(load_run(save_untrained(tmp_path, "tokenizer=byte")))
    with refuses("lm_eval: no id for the end of text", 3):
        model.loglikelihood([request("", "a")])
    with refuses("lm_eval: 17 tokens to score exceed the context of 16", 3):
        model.loglikelihood([request("a", "b" * 17)])
    with refuses("lm_eval: 256 tokens to generate fill the context of 16"):
        model.generate_until([request("a", {"until": ["b"]})])
