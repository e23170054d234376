"""Recipes as settings: what reaches which layer, how their numbers shrink, and what is refused."""

from typing import Any

import pytest
import torch
from building import menu
from support import refuses

from gptattn.build.model import build_model, describe_missing_parts
from gptattn.cli.commands.check import check as check_all
from gptattn.model.cost import measure_cost
from gptattn.settings.compose import settings

WIDE = ("model.d_model=128", "model.num_heads=16", "model.context_length=8192")


def read_layer(layer: str, *overrides: str) -> dict[str, Any]:
    return settings(overrides).layers[layer]["attn"]


def test_numbers_shrink_by_one_rule():
    local = read_layer("local", "recipe=gemma3", *WIDE)
    assert local["num_kv_heads"] == 8  # two query heads each
    assert local["window"] == 1024 * 8192 // 32768
    # Groups of 16 would leave one head of keys and values; two must remain.
    assert read_layer("full", "recipe=glm4", *WIDE)["num_kv_heads"] == 2
    # Groups of at most 8 that divide 12 heads; a window of 3 tokens becomes one of 8.
    small = read_layer("local", "recipe=gpt_oss", "model.num_heads=12", "model.d_model=96")
    assert (small["num_kv_heads"], small["window"]) == (2, 8)
    assert read_layer("full", "recipe=llama3", "model.num_heads=1")["num_kv_heads"] == 1


def test_what_is_typed_for_all_layers_reaches_those_that_have_it():
    typed = ("attn.window=5", "attn.backend=reference", "position.base=7", "part.qk_norm.eps=0.5")
    cfg = settings(["recipe=gemma3", *typed, "part=[gate]", "model.dropout=0.25"])
    local, full = cfg.layers["local"], cfg.layers["full"]
    assert (local["attn"]["window"], full["attn"]["window"]) == (5, None)
    for layer in (local, full):
        assert layer["attn"]["backend"] == "reference"
        assert layer["position"]["base"] == 7
        assert layer["part"]["qk_norm"]["eps"] == 0.5
    assert (cfg.variant, [*cfg.part], cfg.position) == ("gemma3+gate", ["gate"], {})
    last = build_model(cfg, 13).layers()[-1].attention
    assert [*last.parts] == ["gate", "qk_norm"]
    assert last.dropout == 0.25


def test_a_pattern_may_end_within_a_round():
    model = build_model(settings(["recipe=gemma3", "model.num_layers=7"]), 13)
    windows = [block.attention.window for block in model.layers()]
    assert windows == [8] * 5 + [None, 8]


def test_layers_can_be_written_on_the_command_line():
    own = "layers={near:{attn:{gqa:{window:3}},part:[sink]},far:{attn:mha,position:rope}}"
    cfg = settings(["pattern=[near,far,mqa]", own, "model.num_layers=3", "position=alibi"])
    near, far, plain = (cfg.layer(i) for i in range(3))
    assert (near.attn["window"], [*near.part]) == (3, ["sink"])
    kinds = [one.position["_target_"].rpartition(".")[2] for one in (near, far, plain)]
    assert kinds == ["LinearBias", "RotaryPosition", "LinearBias"]
    assert cfg.variant == "near,far,mqa"


def test_a_recipe_in_another_order_keeps_its_name():
    assert settings(["recipe=gemma3", "pattern=[local,full]"]).variant == "gemma3:local,full"
    assert settings(["recipe=gemma3", "pattern=[full]"]).variant == "gemma3:full"


def test_layers_that_cannot_take_a_part_are_named():
    cfg = settings(["recipe=qwen3_next", "part=[sink]", "model.num_layers=5"])
    line = "part=sink: left out of linear, which cannot take it"
    assert describe_missing_parts(cfg, build_model(cfg, 13)) == [line]


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("recipe=gemma3 model.num_layers=4", "pattern: 6 layers"),
        ("recipe=gemma3 attn=mha", "attn: combined"),
        ("recipe=gemma3 attn.kv_rank=3", "attn.kv_rank: num_kv_heads"),
        ("pattern=[gqa] layers={a:{attn:mha}}", "layers.a: not in pattern"),
        ("pattern=[a] layers={a:{part:[sink]}}", "layers.a: {attn: gqa}"),
        ("pattern=[a] layers={a:{attn:mha,parts:[sink]}}", "layers.a.parts: part"),
        ("pattern=[a] layers={a:{attn:{mha:{},mqa:{}}}}", "layers.a.attn: mha and mqa"),
    ],
)
def test_a_mistake_names_its_field(typed, said):
    with refuses(said):
        settings(typed.split())


@pytest.mark.slow
@pytest.mark.parametrize("recipe", menu("recipe"))
def test_two_rounds_of_a_recipe_pass_all_checks_and_its_cache_is_counted(recipe, capsys):
    layers = len(settings([f"recipe={recipe}"]).pattern or [])
    rounds = (f"recipe={recipe}", f"model.num_layers={2 * layers}", "model.context_length=96")
    check_all(rounds)
    assert f"{recipe} passed every check" in capsys.readouterr().out
    with torch.device("meta"):
        model = build_model(settings(rounds), 256)
    caches = [block.attention.new_cache(1, 96).nbytes for block in model.layers()]
    assert measure_cost(model).kv_bytes_per_token == sum(caches) / 96


def test_a_layers_file_may_begin_with_another_wherever_hydra_searches(tmp_path):
    (tmp_path / "attn").mkdir()
    text = "defaults: [gqa, _self_]\nnum_kv_heads: 1\n"
    (tmp_path / "attn" / "own.yaml").write_text(text, encoding="utf-8")
    searched = f"hydra.searchpath=[file://{tmp_path}]"
    (spec, *_) = settings([searched, "pattern=[own,mha]"]).layers.values()
    assert spec["attn"]["_target_"].endswith("GroupedQueryAttention")
    assert spec["attn"]["num_kv_heads"] == 1
