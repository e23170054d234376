"""Matched comparisons: within 1%, the nearest width, worked by hand where that is possible."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from building import read_file, settings, slow_but
from support import TINY, refuses, summary, train

from gptattn.build.match import apply_match
from gptattn.build.model import build_model
from gptattn.model.cost import Cost, measure_cost
from gptattn.settings.compose import CONF
from gptattn.settings.config import TrainConfig

SIZES = [o for o in TINY if o.startswith("model.")]
VARIANTS = sorted(file.stem for file in (CONF / "attn").glob("*.yaml"))


def matched(*overrides: str) -> TrainConfig:
    """The settings of a model for bytes, its match applied."""
    asked = dict(o.split("=", 1) for o in overrides if o.startswith(("match=", "match_to=")))
    plain = (o for o in overrides if not o.startswith(("match=", "match_to=")))
    cfg = replace(settings("trainer=cpu", *plain), **asked)
    if cfg.match == "none":
        return cfg
    return apply_match(replace(cfg, match_attn=read_file("attn", cfg.match_to)), 256)


def tiny(*overrides: str) -> TrainConfig:
    return matched(*SIZES, *overrides)


def cost(cfg: TrainConfig) -> Cost:
    with torch.device("meta"):
        return measure_cost(build_model(cfg, 256))


@cache
def cost_of_mha(*overrides: str) -> Cost:
    return cost(matched(*overrides))


def test_the_mlp_of_the_leaner_variant_takes_up_its_missing_parameters():
    # d_model 16, one layer, MLP 64. With 2 of 4 key/value heads, GQA lacks half of two matrices,
    # 2 * 16 * 8, and of their biases, 2 * 8: 272. A unit of width has 16 + 1 + 16 = 33 parameters,
    # so 8 units have 264.
    cfg = tiny("attn=gqa", "match=params")
    assert cfg.model.d_mlp == 64 + 8
    assert cost(cfg).params == cost(tiny()).params - 272 + 264


@pytest.mark.parametrize("variant", slow_but({"mla", "gated_deltanet"}, VARIANTS))
def test_every_variant_of_a_tiny_model_comes_within_a_thousandth(variant):
    params = cost(matched("model=tiny", f"attn={variant}", "match=params")).params
    assert params == pytest.approx(cost_of_mha("model=tiny").params, rel=1e-3)
    flops = cost(matched("model=nano", f"attn={variant}", "match=flops")).flops_per_token
    assert flops == pytest.approx(cost_of_mha("model=nano").flops_per_token, rel=1e-3)


def test_an_override_of_the_variant_is_not_one_of_the_reference():
    cfg = tiny("attn=gqa", "attn.num_kv_heads=1", "match=params", "match_to=gqa")
    # The second key/value head, of size 4, in two matrices and biases: 2 * (16 * 4 + 4) = 136.
    assert cfg.model.d_mlp == 64 + round(136 / 33)


def test_no_width_that_is_near_enough_is_an_error():
    # Without the MLP's width to take from, MHA keeps its 3 further heads of keys and values:
    # 2 * (16 * 12 + 12) = 408 parameters more than MQA's 5,177.
    with refuses("match: d_mlp=1"):
        tiny("model.d_mlp=1", "attn=mha", "match=params", "match_to=mqa")


def test_a_match_that_is_made_stays_as_it_is():
    # A resumed run matches the settings in its config.yaml, which are matched already.
    cfg = tiny("attn=gqa", "attn.num_kv_heads=1", "match=params")
    made = apply_match(cfg, 256)
    assert made.match_made["before"] != made.match_made["after"]
    assert apply_match(made, 256) == made


@pytest.mark.parametrize("own", ["part=[gate,forget]", "attn=sliding", "pattern=[sliding,mqa]"])
def test_parts_windows_and_patterns_match_the_plain_variant_in_their_block(own):
    plain = ("model=nano", "block=llama")
    flops = cost(matched(*plain, own, "match=flops")).flops_per_token
    assert flops == pytest.approx(cost_of_mha(*plain).flops_per_token, rel=1e-3)


def test_what_was_matched_is_printed_and_in_the_summary(tmp_path, capfd):
    run = train(tmp_path, "attn=gqa", "match=params")
    record = summary(run)
    assert "match=params: model.d_mlp 64 -> 72; " in capfd.readouterr().out
    match = record["match"]
    assert (match["what"], match["to"], match["field"]) == ("params", "mha", "model.d_mlp")
    assert (match["before"], match["after"]) == (64, record["hyperparameters"]["d_mlp"]) == (64, 72)
    assert match["reached"] == record["metrics"]["cost/params"] == match["target"] - 8
