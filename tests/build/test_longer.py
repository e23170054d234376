"""Trained models with a longer context: what stays the same, and which ones are refused."""

from dataclasses import replace

import pytest
import torch
from building import SMALL, build_gpt, settings
from support import refuses

from gptattn.attention.softmax import SoftmaxAttention
from gptattn.build.longer import build_longer, check_length
from gptattn.build.model import build_model
from gptattn.model.gpt import GPT
from gptattn.position import RotaryPosition
from gptattn.settings.config import TrainConfig

LONG = 29


def trained(*overrides: str) -> tuple[TrainConfig, GPT]:
    overrides = ("model.d_model=48", *overrides)
    return settings(*SMALL, *overrides), build_gpt(*overrides, std=0.3).eval()


@pytest.mark.parametrize(
    ("attn", "position"),
    [("gqa", "alibi"), ("gqa", "sinusoidal"), ("sliding", "rope"), ("mla", "none")],
)
@torch.no_grad()
def test_a_longer_model_computes_the_same_and_continues(attn, position):
    cfg, own = trained(f"attn={attn}", f"position={position}")
    check_length(cfg, own, LONG)
    model = build_longer(cfg, own, LONG)
    ids = torch.randint(13, (2, LONG))
    logits = model(ids)
    torch.testing.assert_close(logits[:, :11], own(ids[:, :11]), rtol=0, atol=1e-5)
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
    model = build_longer(*trained(attn, "position=rope"), LONG)
    layers = [block.attention for block in model.layers()]
    found = [one.window for one in layers if isinstance(one, SoftmaxAttention)]
    assert found == windows  # 0.25 * 11, rounded up


def test_a_stretched_context_keeps_the_one_that_it_was_stretched_from():
    stretched = ("position=rope", "model.context_length=12", "position.stretch=4.0")
    cfg, own = trained(*stretched)
    modules = build_longer(cfg, own, LONG).modules()
    position = next(m for m in modules if isinstance(m, RotaryPosition))
    assert (position.original_context, position.stretch, len(position.cos_TR)) == (3, 4.0, LONG)


def test_a_longer_model_has_the_weights_of_the_other_and_draws_nothing():
    cfg, own = trained("attn=mha", "position=rope", "block=llama")
    own.train()
    before = torch.get_rng_state()
    model = build_longer(cfg, own, LONG)
    assert torch.equal(torch.get_rng_state(), before)
    assert (own.training, model.training) == (True, False)
    assert all(a is b for a, b in zip(own.parameters(), model.parameters(), strict=True))


def test_a_longer_model_that_computes_something_else_is_refused():
    cfg, own = trained("attn=sliding", "position=rope")
    # As a setting of a user's own that is a share of the context, which nobody knows here.
    changed = replace(cfg, attn=cfg.attn | {"window": 5})
    with refuses("lengths: sliding"):
        build_longer(changed, own, LONG)


def test_learned_positions_end_with_the_trained_ones():
    cfg, own = trained("attn=mha", "position=learned")
    check_length(cfg, own, 11)
    assert build_longer(cfg, own, 11) is own
    with refuses("lengths: position=learned"):
        check_length(cfg, own, 12)


def test_layers_that_begin_without_effect_are_compared_all_the_same():
    cfg, model = trained("attn=dsa", "position=rope", "block.zero_init=true")
    with torch.no_grad():
        for block in model.layers():
            for layer in (block.attention.residual_writer(), block.mlp.down):
                layer.weight.zero_()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with refuses("lengths"):  # topk is a share of the context
        build_longer(cfg, model, 4 * LONG)
    assert all(weight.equal(before[name]) for name, weight in model.state_dict().items())


def test_a_scalar_may_be_zero():
    cfg = settings(*SMALL, "position=none")
    cfg = replace(
        cfg, attn={"_target_": "broken_layers.GatedByAScalar"}, allow_targets=["broken_layers"]
    )
    model = build_model(cfg, 13)
    assert build_longer(cfg, model, LONG).context_length == LONG
    gates = [x for name, x in model.named_parameters() if name.endswith("gate")]
    assert len(gates) == 2
    assert not any(gates)
