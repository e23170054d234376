"""Runs in lm-evaluation-harness, against transformers' models in the harness's own adapter."""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import yaml
from building import build_gpt, settings
from llamas import shake
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from support import bpe, refuses, save_untrained, train
from tokenizers import decoders
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

import gptattn
from gptattn.attention.foreign import ForeignAttention
from gptattn.data.bpe import ByteLevelBPE
from gptattn.data.tokenizer import ByteTokenizer
from gptattn.evaluate import harness
from gptattn.evaluate.measure import measure
from gptattn.runs.evaluation import Basis, Evaluation, TaskScores
from gptattn.runs.folder import RunFolder
from gptattn.runs.load import SavedRun, load_run
from gptattn.weights.hugging_face import find_family, load_checkpoint

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


def request(*arguments: Any) -> Any:
    return Instance(request_type="loglikelihood", doc={}, arguments=arguments, idx=0)


@pytest.fixture(params=["gpt2", "llama", "foreign"])
def both(request, tmp_path) -> tuple[Any, Any]:
    """One model with random weights, in our adapter and in the harness's HFLM."""
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
    hflm = HFLM(theirs, tokenizer=tokenizer, batch_size=3, max_length=T)
    return harness.HarnessModel(saved), hflm


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


def test_a_context_is_read_once_for_all_continuations_longest_first(tmp_path, monkeypatch):
    folder = save_untrained(tmp_path, "tokenizer=byte", "model.context_length=64")
    model = harness.HarnessModel(load_run(folder))
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
    # Four rows of 16 tokens fit, so the eight continuations of the next context wait.
    read.clear()
    model.loglikelihood([request("a" * 15, "b"), *(request("aa", c) for c in "abcdefgh")])
    assert read == [(1, 15), (1, 1), (8, 1)]


def test_what_the_model_cannot_answer_is_refused_in_one_line(tmp_path):
    model = harness.HarnessModel(load_run(save_untrained(tmp_path, "tokenizer=byte")))
    with refuses("lm_eval: end-of-text", 3):
        model.loglikelihood([request("", "a")])
    with refuses("lm_eval: 17 tokens", 3):
        model.loglikelihood([request("a", "b" * 17)])
    with refuses("lm_eval: has 0 tokens", 3):  # as one that is merged into its context
        model.loglikelihood([request("a", "")])
    with refuses("lm_eval: 256 tokens"):
        model.generate_until([request("a", {"until": ["b"]})])


def test_text_is_drawn_as_the_task_says_or_refused(tmp_path):
    model = harness.HarnessModel(load_run(save_untrained(tmp_path, "tokenizer=byte")))
    given = {"until": [], "max_gen_toks": 9}
    drawn = {"do_sample": True, "top_p": 1.0}

    def generate(**more: Any) -> str:
        return model.generate_until([request("Line", given | more)])[0]

    assert generate(**drawn, top_k=1) == generate(num_beams=1) == generate()
    assert len({generate(**drawn) for _ in range(3)}) > 1
    with refuses("lm_eval: top_p"):
        generate(do_sample=True, top_p=0.95)
    with refuses("lm_eval: num_beams"):
        generate(num_beams=10)


ITEMS = [
    {
        "question": f"Line {i:03d}: naïve",
        "choices": [" π", " e 1", "0000", " The"],
        "answer": i % 4,
    }
    for i in range(8)
]


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """A task of multiple choice from a local JSON file."""
    data = tmp_path / "lines.json"
    data.write_text("\n".join(map(json.dumps, ITEMS)))
    metrics = [
        {"metric": name, "aggregation": "mean", "higher_is_better": True}
        for name in ("acc", "acc_norm")
    ]
    task = {
        "task": "lines",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(tmp_path / "hf")},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": metrics,
        "metadata": {"version": 1.0},
    }
    (tmp_path / "lines.yaml").write_text(yaml.safe_dump(task))
    return tmp_path / "lines.yaml"


@torch.no_grad()
def choose(run: SavedRun, item: dict[str, Any]) -> int:
    """The likeliest choice, each scored on its own by the whole text's logits."""
    scores = []
    for choice in item["choices"]:
        before = run.tokenizer.encode(item["question"], "")
        ids = torch.from_numpy(run.tokenizer.encode(item["question"] + choice, "").astype("int64"))
        losses = cross_entropy(run.model(ids[None, :-1])[0], ids[1:], reduction="none")
        scores.append(-losses[len(before) - 1 :].sum().item())
    return max(range(4), key=scores.__getitem__)


def test_scores_on_a_local_task_are_kept_item_by_item(lines, tmp_path, call):
    sizes = ("model.context_length=48", "model.d_model=32", "tokenizer=byte")
    run = train(tmp_path / "trained", "attn=gqa", *sizes)
    code, out, _ = call("evaluate", f"run={run}", f"lm_eval=[{lines}]", "device=cpu")
    assert code == 0
    saved, scores = load_run(run), RunFolder(run).read_evaluation().tasks["lines"]
    right = [float(choose(saved, item) == item["answer"]) for item in ITEMS]
    assert scores.items["acc"] == right
    assert scores.values["acc"] == pytest.approx(np.mean(right))
    assert 0 < np.mean(right) < 1
    assert scores.errors["acc"] == pytest.approx(np.std(right, ddof=1) / len(right) ** 0.5)
    assert (scores.harness, scores.shots) == (version("lm_eval"), 0)
    assert f"acc {scores.values['acc']:.4f} ± {scores.errors['acc']:.4f}" in out


def test_a_group_has_the_digest_of_its_members_items(lines, tmp_path, monkeypatch):
    own = {"include_path": tmp_path, "include_defaults": False}
    monkeypatch.setattr(harness, "find_tasks", lambda _: TaskManager(**own))
    task = yaml.safe_load(lines.read_text())
    mean = [{"metric": "acc", "aggregation": "mean", "weight_by_size": True}]
    group = {"group": "both", "task": ["lines"], "aggregate_metric_list": mean}
    (tmp_path / "both.yaml").write_text(yaml.safe_dump(group))
    saved = load_run(save_untrained(tmp_path, "tokenizer=byte", "model.context_length=48"))
    found = harness.score_tasks(saved, "both")
    assert found["both"].values == {"acc": found["lines"].values["acc"]}
    assert found["both"].digest == found["lines"].digest
    task["doc_to_text"] = "{{question}}."
    lines.write_text(yaml.safe_dump(task))
    assert harness.score_tasks(saved, "both")["both"].digest != found["both"].digest


def test_a_task_is_known_once_it_was_asked_by_this_name_of_this_harness(monkeypatch, tmp_path):
    file = tmp_path / "told.yaml"
    file.touch()
    asked: list[str] = []

    def score(saved: Any, task: str) -> dict[str, TaskScores]:
        asked.append(task)
        names = ("told", "tale") if task == "both" else ("told",)
        return {name: TaskScores(task, version("lm_eval"), 0, "", {}, {}, {}) for name in names}

    monkeypatch.setattr(harness, "score_tasks", score)
    found = Evaluation(Basis("", "", "", "cpu"), 1, 16)
    given: Any = None
    for question in (str(file), str(file), "told", "told", "both", "tale", "both"):
        found = measure(given, given, question, found)
    assert asked == [str(file), str(file), "told", "both", "tale"]
    old = msgspec.structs.replace(found.tasks["told"], harness="0.4.12")
    measure(given, given, "both", msgspec.structs.replace(found, tasks={"told": old}))
    assert asked[5:] == ["both"]


def test_a_damaged_file_of_a_task_is_one_line(tmp_path):
    saved = load_run(save_untrained(tmp_path, "tokenizer=byte"))
    (file := tmp_path / "told.yaml").write_text("task: told\n  dataset_path: [\n")
    with refuses("lm_eval: check the file", 3):
        harness.score_tasks(saved, str(file))


@pytest.mark.slow  # the harness reads all of its 10,000 files
def test_a_task_that_is_unknown_or_has_no_data_is_one_line(tmp_path, monkeypatch):
    saved = load_run(save_untrained(tmp_path, "tokenizer=byte"))
    with refuses("lm_eval: 'lambda_openai' is neither a task"):
        harness.check_task("lambda_openai")
    harness.check_task("lambada_openai")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with refuses("lm_eval: EleutherAI/lambada_openai", 3):
        harness.score_tasks(saved, "lambada_openai")


def test_a_run_is_a_model_of_the_harness_in_python(tmp_path):
    folder = save_untrained(tmp_path, "tokenizer=byte")
    model = gptattn.lm_eval_model(folder)
    assert isinstance(model, LM)
    assert model.max_length == gptattn.lm_eval_model(load_run(folder)).max_length == 16


def test_each_mechanism_answers_alike_from_a_context_that_is_shared(variant, tmp_path):
    gpt = build_gpt(f"attn={variant}", "model.context_length=24", vocab_size=256, std=0.1).eval()
    model = harness.HarnessModel(SavedRun(tmp_path, settings(), gpt, ByteTokenizer(), tmp_path))
    contexts, endings = ("The first is", "And the second is"), (" a", " bcd", " efg hi")
    requests = [request(context, ending) for context in contexts for ending in endings]
    alone = [model.loglikelihood([one])[0] for one in requests]
    read = reads(gpt)
    together = model.loglikelihood(requests)
    assert read == [(2, 11), (6, 12)]
    assert [x for x, _ in together] == pytest.approx([x for x, _ in alone], abs=1e-4)
    assert len({round(x, 3) for x, _ in alone}) == len(requests)
