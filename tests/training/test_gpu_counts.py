"""What a GPU does in training, counted on fake tensors: kernels, bytes, and waits of the host."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from building import CONTRACT, SMALL, build_gpt, chosen, menu, settings
from fakecuda import Counts, attend_by_flex, count_on_cuda

from gptattn.attention import core
from gptattn.attention.base import Shared
from gptattn.build.model import resolve_backends
from gptattn.data.tasks import Recall, TaskData
from gptattn.data.tokenizer import TaskIds
from gptattn.machine.device import Toolchain
from gptattn.model.loss import linear_cross_entropy, logits_to_gradient
from gptattn.position import Documents

# GB beside products of a block of GPT-2 small, forward and backward without torch.compile, on 16
# rows of 256 tokens in bf16-mixed, by torch's own kernels. A twentieth more than was counted.
GIGABYTES = {
    "cross_layer": 0.81,
    "differential": 1.62,
    "dsa": 4.47,
    "gated_deltanet": 7.29,
    "gqa": 0.81,
    "gqa+forget": 2.79,
    "gqa+gate": 0.99,
    "gqa+qk_norm": 1.43,
    "gqa+sink": 1.97,
    "gqa+softcap": 2.18,
    "gqa+temperature": 0.84,
    "gqa+value_residual": 0.81,
    "kda": 11.56,
    "lightning": 2.64,
    "mamba2": 8.08,
    "mha": 0.84,
    "mha@alibi": 2.07,
    "mha_wrapper": 4.47,
    "mla": 1.26,
    "mqa": 0.81,
    "rwkv7": 12.86,
    "short_conv": 1.53,
    "single_head": 0.82,
    "sliding": 0.93,
    "tpa": 1.05,
}
QUICK = [*menu("attn"), "gqa+sink", "mha@alibi"]

# Kernels and GB of a block in docs/gpu.md, by its settings: of blocks of queries, and fused.
ROW = re.compile(r"^\| `(attn=.*?)` \| (\d+) / ([\d.]+) \| (\d+) / ([\d.]+) \|$", re.MULTILINE)
PAGE = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text()
CLAIMED = {of_all: [*map(float, figures)] for of_all, *figures in ROW.findall(PAGE)}


def count_head(
    vocab_size: int, chunk_tokens: int | None, to_gradient: Any = logits_to_gradient
) -> tuple[int, float, float]:
    """Kernels, GB and TFLOP of GPT-2 small's head and loss on 16 x 1,024 tokens."""

    def head(counts: Counts) -> tuple[int, float, float]:
        hidden = torch.empty(2**14, 768, device="cuda", requires_grad=True)
        weight = torch.empty(vocab_size, 768, device="cuda", requires_grad=True)
        targets = torch.empty(2**14, device="cuda", dtype=torch.int64)
        counts.kernels.clear()
        with torch.autocast("cuda", torch.bfloat16):
            loss = linear_cross_entropy(hidden, weight, targets, chunk_tokens, to_gradient)
        loss.backward()
        assert counts.waits == []
        return len(counts.kernels), counts.gigabytes(), counts.teraflops()

    return count_on_cuda(head)


def test_the_head_takes_ten_kernels_per_chunk_and_a_gpt2_step_fits_one():
    whole, gigabytes, _ = count_head(50304, None)
    assert whole == count_head(50304, 2**14)[0] <= 20
    assert count_head(50304, 2**12)[0] - whole <= 3 * 10
    assert gigabytes <= 30 * 2**14 * 50304 / 1e9


def test_a_vocabulary_that_is_no_multiple_costs_no_more_than_its_padding():
    _, gigabytes, teraflops = count_head(50257, None)
    _, padded_gigabytes, padded_teraflops = count_head(50304, None)
    assert teraflops == padded_teraflops
    assert gigabytes <= 1.01 * padded_gigabytes


def count_blocks(
    choices: list[tuple[str, ...]], context_length: int, *, fused: bool = False
) -> list[tuple[int, float]]:
    """Kernels and GB of blocks of GPT-2 small, forward and backward, on 16 rows in bf16-mixed.

    `fused` takes the backends that a run on a GPU would; otherwise those of a CPU.
    """
    size = ("model.num_layers=2", "model.d_model=768", "model.num_heads=12")
    size = (*size, f"model.context_length={context_length}", "trainer.precision=bf16-mixed")
    tools = Toolchain((9, 0), "", (3, 7, 1), False)
    sized = []
    for choice in choices:
        cfg = settings(*SMALL, *choice, *size)  # cached for the child
        found, _ = resolve_backends(cfg, torch.device("cuda" if fused else "cpu"), tools)
        sized.append(((*choice, *size), found.layer(0).attn.get("backend")))

    def count(counts: Counts) -> list[tuple[int, float]]:
        found = []
        for overrides, backend in sized:
            with torch.device("cuda"):
                block = build_gpt(*overrides).layers()[0]
                x = torch.empty(16, context_length, 768, requires_grad=True)
                documents = Documents(torch.zeros(x.shape[:2], dtype=torch.int64))
            apart = "data.mask_documents=true" in overrides
            shared = Shared(documents if apart else range(context_length), losses={})
            if backend == "flex":
                block.attention.backend = backend
                rule = block.attention.rule()
                shared.masks = {(rule.window, rule.chunk): Mock()}  # made outside of blocks
            counts.kernels.clear()
            counts.waits.clear()
            with torch.autocast("cuda", torch.bfloat16):
                y = block(x, None, shared)
            losses = [loss for of_layers in (shared.losses or {}).values() for loss in of_layers]
            torch.autograd.backward([y, *losses], [torch.empty_like(out) for out in (y, *losses)])
            assert counts.waits == [], overrides
            found.append((len(counts.kernels), counts.gigabytes()))
        return found

    return count_on_cuda(count)


@pytest.mark.parametrize(
    "variants",
    [
        *(QUICK[i::2] for i in range(2)),
        pytest.param([v for v in CONTRACT if v not in QUICK], marks=pytest.mark.slow),
    ],
    ids=",".join,
)
def test_no_variants_block_moves_more_bytes_than_before_or_waits(variants):
    names = [variant.partition("@") for variant in variants]
    choices = [(*chosen(of_layer), f"position={name or 'none'}") for of_layer, _, name in names]
    found = dict(zip(variants, count_blocks(choices, 256), strict=True))
    assert {name: gb for name, (_, gb) in found.items() if gb > GIGABYTES.get(name, gb)} == {}


def is_as_claimed(counted: tuple[int, float], claimed: list[float]) -> bool:
    """Within a twentieth; torch 2.11 takes fewer kernels for a norm, and a fifth fewer bytes."""
    return all(0.75 < one / of < 1.05 for one, of in zip(counted, claimed, strict=True))


def test_fused_kernels_keep_a_block_close_to_plain_attention_as_documented(
    monkeypatch,
):
    """What flex itself moves is not counted: a fused kernel stands for its one call."""
    stands_for = {core.flex_attention: attend_by_flex}
    alone = lambda function, **options: stands_for.get(function, function)  # noqa: E731
    monkeypatch.setattr(core, "compile_alone", alone)
    found = count_blocks([tuple(of_all.split()) for of_all in CLAIMED], 1024, fused=True)
    for (overrides, claimed), counted in zip(CLAIMED.items(), found, strict=True):
        assert is_as_claimed(counted, claimed[2:]), overrides
    plain, *by_flex, _ = found
    assert len(by_flex) == 5
    assert all(kernels < 1.3 * plain[0] and gb < 1.2 * plain[1] for kernels, gb in by_flex)


@pytest.mark.slow
def test_blocks_of_queries_move_what_the_page_says(monkeypatch):
    monkeypatch.setattr(core, "GPUS", ())  # differential attention fuses on a GPU
    found = count_blocks([tuple(of_all.split()) for of_all in CLAIMED], 1024)
    for (overrides, claimed), counted in zip(CLAIMED.items(), found, strict=True):
        assert is_as_claimed(counted, claimed[:2]), overrides


@pytest.mark.parametrize("batch", ["text", "documents", "task"])
def test_in_a_training_step_the_host_never_waits(batch):
    from gptattn.training.module import LanguageModel  # slow to import

    class OnCuda(LanguageModel):
        device = torch.device("cuda")

    task = TaskData(Recall(vocab_size=64, pairs=2), 11, TaskIds(64))
    on_host = task.training_batch(1, 1, 4, 11)
    data = task if batch == "task" else SimpleNamespace(val_bytes=1)
    if batch != "task":
        on_host = on_host[0], on_host[0]
    cfg = settings(*SMALL, "batch_size=4", "part=sink")

    def step(counts: Counts) -> list[str]:
        with torch.device("cuda"):
            model = build_gpt("part=sink", vocab_size=64)
        module = OnCuda(model, cfg, data, lambda step: 0.5, None)
        module.trainer = SimpleNamespace(world_size=1, global_step=0, global_rank=0)
        optimizer = module.configure_optimizers()
        counts.waits.clear()
        with patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor):
            pinned = module.on_before_batch_transfer(on_host, 0)
        moved = tuple(tensor.to("cuda", non_blocking=True) for tensor in pinned)
        if batch == "documents":
            moved = *moved, torch.zeros_like(moved[0])
        with torch.autocast("cuda", torch.bfloat16):
            loss = module.training_step(moved, 0)
        loss.backward()
        module.configure_gradient_clipping(optimizer)
        optimizer.step()
        assert module.losses["train/loss"].is_cuda
        return counts.waits

    assert count_on_cuda(step) == []
