"""Trained models with a longer context: what stays the same, and which ones are refused."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from building import SMALL, build_gpt, settings
from support import refuses

from gptattn.attention.softmax import SoftmaxAttention
from gptattn.data.tokenizer import ByteTokenizer
from gptattn.evaluate.longer import build_longer, check_length
from gptattn.position import RotaryPosition
from gptattn.runs.load import SavedRun

LONG = 29


def saved_run(*overrides: str) -> SavedRun:
    overrides = ("model.d_model=48", *overrides)
    model = build_gpt(*overrides, std=0.3).eval()
    cfg = settings(*SMALL, *overrides)
    return SavedRun(Path(), cfg, model, ByteTokenizer(), Path())


@pytest.mark.parametrize(
    ("attn", "position"),
    [("gqa", "alibi"), ("gqa", "sinusoidal"), ("sliding", "rope"), ("mla", "none")],
)
@torch.no_grad()
def test_a_longer_model_computes_the_same_and_continues(attn, position):
    saved = saved_run(f"attn={attn}", f"position={position}")
    check_length(saved.cfg, saved.model, LONG)
    model = build_longer(saved, LONG)
    ids = torch.randint(13, (2, LONG))
    logits = model(ids)
    torch.testing.assert_close(logits[:, :11], saved.model(ids[:, :11]), rtol=0, atol=1e-5)
    # A later token changes nothing before it, and something after it.
    other = ids.clone()
    other[:, 20] = (other[:, 20] + 1) % 13
    changed = (model(other) - logits).abs().amax((0, 2)) > 1e-7
    assert not changed[:20].any()
    assert changed[20]


@pytest.mark.parametrize(
    ("attn", "windows"), [("attn=sliding", [3, 3]), ("pattern=[sliding,gqa]", [3, None])]
)
def test_a_share_of_the_context_stays_the_window_that_was_trained(attn, windows):
    model = build_longer(saved_run(attn, "position=rope"), LONG)
    layers = [block.attention for block in model.layers()]
    found = [one.window for one in layers if isinstance(one, SoftmaxAttention)]
    assert found == windows  # 0.25 * 11, rounded up


def test_a_stretched_context_keeps_the_one_that_it_was_stretched_from():
    stretched = ("position=rope", "model.context_length=12", "position.stretch=4.0")
    saved = saved_run(*stretched)
    position = next(m for m in build_longer(saved, LONG).modules() if isinstance(m, RotaryPosition))
    assert (position.original_context, position.stretch, len(position.cos_TR)) == (3, 4.0, LONG)


def test_a_longer_model_that_computes_something_else_is_refused():
    saved = saved_run("attn=sliding", "position=rope")
    # As a setting of a user's own that is a share of the context, which nobody knows here.
    changed = replace(saved, cfg=replace(saved.cfg, attn=saved.cfg.attn | {"window": 5}))
    with refuses("lengths: sliding"):
        build_longer(changed, LONG)


def test_learned_positions_end_with_the_trained_ones():
    saved = saved_run("attn=mha", "position=learned")
    check_length(saved.cfg, saved.model, 11)
    assert build_longer(saved, 11) is saved.model
    with refuses("lengths: position=learned"):
        check_length(saved.cfg, saved.model, 12)
