"""Each recipe is its release: transformers' own attentions, with our weights, give our numbers."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import chain
from typing import Any

import pytest
import torch
from building import disturb, slow_but
from hugging import (
    SIZES,
    B,
    H,
    Pair,
    T,
    assert_agreement,
    keep_float64,
    mask,
    pairs_of_indexer,
    pairs_of_kda,
    pairs_of_lightning,
    pairs_of_mamba2,
    pairs_of_short_conv,
    projections,
    rope,
)
from torch import Tensor, nn
from transformers.masking_utils import create_chunked_causal_mask

from gptattn.attention.base import Attention
from gptattn.attention.variants.differential import EPS, DifferentialAttention
from gptattn.attention.variants.dsa import DeepSeekSparseAttention
from gptattn.attention.variants.gated_deltanet import GatedDeltaNet
from gptattn.attention.variants.kda import KimiDeltaAttention
from gptattn.attention.variants.lightning import LightningAttention
from gptattn.attention.variants.mamba2 import Mamba2
from gptattn.attention.variants.mla import MultiHeadLatentAttention
from gptattn.attention.variants.short_conv import GatedShortConvolution
from gptattn.build.model import build_layer
from gptattn.settings.compose import settings
from gptattn.settings.config import CONF

D = 8  # half and a quarter of it are even
E = H * D
LOCAL, FULL = "sliding_attention", "full_attention"
KV, WINDOW = "num_key_value_heads", {"sliding_window": 8}
LINEAR_LAYERS = "linear_attention"
LATENT = {KV: H, "kv_lora_rank": 8, "qk_nope_head_dim": D, "qk_rope_head_dim": 4, "v_head_dim": D}
DEEPSEEK = LATENT | {"head_dim": 4, "q_lora_rank": 8}


def turned(theta: float, **more: float) -> dict[str, Any]:
    return {"rope_parameters": rope(theta, **more)}


def by_kind(local: float, full: float, **more: float) -> dict[str, Any]:
    return {"rope_parameters": {LOCAL: rope(local, **more), FULL: rope(full, **more)}}


# Recipe -> transformers' module, the name that its classes begin with, and the settings of the
# release at these sizes: 6 heads, 11 tokens, so that a window has 8.
RELEASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama3": ("llama", "Llama", {KV: 2} | turned(5e5)),
    "mistral": ("mistral", "Mistral", {KV: 2} | WINDOW | turned(1e4)),
    "qwen3": ("qwen3", "Qwen3", {KV: 2} | turned(1e6)),
    "olmo3": ("olmo3", "Olmo3", {KV: H, "rms_norm_eps": 1e-6} | WINDOW | by_kind(5e5, 5e5)),
    "glm4": (
        "glm4",
        "Glm4",
        {KV: 2, "attention_bias": True} | turned(1e4, partial_rotary_factor=0.5),
    ),
    "gemma2": (
        "gemma2",
        "Gemma2",
        {KV: 3, "query_pre_attn_scalar": D, "attn_logit_softcapping": 50.0} | WINDOW | turned(1e4),
    ),
    "gemma3": (
        "gemma3",
        "Gemma3Text",
        {KV: 3, "query_pre_attn_scalar": D} | WINDOW | by_kind(1e4, 1e6),
    ),
    "gpt_oss": ("gpt_oss", "GptOss", {KV: 2} | WINDOW | turned(1.5e5)),
    "smollm3": ("smollm3", "SmolLM3", {KV: 2} | turned(5e6)),
    "exaone4": (
        "exaone4",
        "Exaone4",
        {KV: 2, "sliding_window_pattern": 4, "rms_norm_eps": 1e-5} | WINDOW | turned(1e6),
    ),
    "deepseek_v3": ("deepseek_v3", "DeepseekV3", DEEPSEEK | turned(1e4)),
    "deepseek_v32": (
        "deepseek_v32",
        "DeepseekV32",
        DEEPSEEK | {"index_n_heads": 24, "index_head_dim": D, "index_topk": 8} | turned(1e4),
    ),
    "glm5": (
        "glm_moe_dsa",
        "GlmMoeDsa",
        DEEPSEEK
        | {"q_lora_rank": 16, "index_n_heads": 24, "index_head_dim": D, "index_topk": 8}
        | turned(1e6),
    ),
    "llama4": (
        "llama4",
        "Llama4Text",
        {KV: 2, "attention_chunk_size": 8, "floor_scale": 8} | turned(5e5),
    ),
    "diffllama": ("diffllama", "DiffLlama", {KV: 2, "rms_norm_eps": EPS} | turned(1e4)),
    "kimi_linear": (
        "kimi_linear",
        "KimiLinear",
        LATENT
        | {"layer_types": [LINEAR_LAYERS] * 3 + [FULL], "q_lora_rank": None}
        | {"linear_head_dim": D, "linear_num_heads": H},
    ),
    "lfm2": ("lfm2", "Lfm2", {KV: 2, "layer_types": ["conv", "conv", FULL]} | turned(1e6)),
    "minimax_m2": ("minimax_m2", "MiniMaxM2", {KV: 2} | turned(5e6, partial_rotary_factor=0.5)),
    "olmo_hybrid": ("olmo_hybrid", "OlmoHybrid", {KV: H} | turned(5e5)),
    "hunyuan": ("hunyuan_v1_dense", "HunYuanDenseV1", {KV: 2} | turned(1e4)),
    "mimo_v2_flash": (
        "mimo_v2_flash",
        "MiMoV2Flash",
        {KV: 1, "v_head_dim": D, "layer_types": [LOCAL] * 5 + [FULL]}
        | WINDOW
        | by_kind(1e4, 5e6, partial_rotary_factor=0.334),
    ),
    "trinity": ("afmoe", "Afmoe", {KV: 2} | WINDOW | turned(1e4)),
    "minimax": (
        "minimax",
        "MiniMax",
        {KV: 2, "layer_types": [LINEAR_LAYERS] * 7 + [FULL], "block_size": 8} | turned(1e7),
    ),
    "mamba2": ("mamba2", "Mamba2", {"num_heads": 2 * H, "state_size": 128, "n_groups": 2}),
    "granite4": (
        "granitemoehybrid",
        "GraniteMoeHybrid",
        {KV: 2, "layer_types": ["mamba"] * 5 + ["attention"] + ["mamba"] * 4}
        | {"attention_multiplier": 1 / D, "rms_norm_eps": 1e-5}
        | {"mamba_n_heads": 2 * H, "mamba_d_head": D, "mamba_d_state": 16},
    ),
    "qwen3_next": (
        "qwen3_next",
        "Qwen3Next",
        {KV: 2, "linear_num_key_heads": H, "linear_num_value_heads": 2 * H}
        | {"linear_key_head_dim": D, "linear_value_head_dim": D}
        | turned(1e7, partial_rotary_factor=0.25),
    ),
}


# For speed, for groups and several chunks; and with 3 heads scores would be 0 by ReLU, of which
# theirs chooses any.
CHANGED = {
    "granite4": ["attn.state_size=16"],
    "mamba2": ["attn.groups=2", "attn.chunk=4"],
    "diffllama": ["attn.num_kv_heads=2"],
    "deepseek_v32": ["attn.index_heads=24"],
    "glm5": ["attn.index_heads=24"],
    "mimo_v2_flash": ["layers.full.attn.gqa.num_kv_heads=1"],  # 16 query heads to each
}
LINEAR = {
    KimiDeltaAttention: pairs_of_kda,
    Mamba2: pairs_of_mamba2,
    LightningAttention: pairs_of_lightning,
    GatedShortConvolution: pairs_of_short_conv,
}
# How the names of transformers' classes for layers with a state end.
ENDS = ("GatedDeltaNet", "DeltaAttention", "LightningAttention", "MambaLayer", "Mixer", "ShortConv")
# Where a release calls a module of its attention otherwise.
NAMES = {
    "hunyuan": {"q_norm": "query_layernorm", "k_norm": "key_layernorm"},
    "lfm2": {"o_proj": "out_proj", "q_norm": "q_layernorm", "k_norm": "k_layernorm"},
}


def build(recipe: str, *overrides: str) -> list[Attention]:
    """The attentions of one round, in float64 and with noise on every parameter."""
    sizes = [f"model.d_model={E}", f"model.num_heads={H}", f"model.context_length={T}"]
    cfg, encodings, provided = settings([f"recipe={recipe}", *sizes, *overrides]), {}, {}
    cfg = replace(cfg, model=replace(cfg.model, num_layers=len(cfg.pattern)))
    layers = [build_layer(cfg, encodings, provided, i).double() for i in range(len(cfg.pattern))]
    disturb(nn.ModuleList(layers), std=0.3)
    return layers


def pairs_of(mine: Attention, theirs: Any, recipe: str) -> list[Pair]:
    """Where each of our parameters lies in theirs."""
    for kind, pairs in LINEAR.items():
        if isinstance(mine, kind):
            return pairs(mine, theirs)
    if isinstance(mine, MultiHeadLatentAttention):
        up, C = theirs.kv_b_proj.weight, mine.kv_rank
        found = [
            Pair(mine.W_latent.weight, theirs.kv_a_proj_with_mqa.weight),
            Pair(mine.latent_norm.weight, theirs.kv_a_layernorm.weight),
            Pair(mine.W_key.weight, up, lambda w: w.view(H, 2, D, C)[:, 0]),
            Pair(mine.W_value.weight, up, lambda w: w.view(H, 2, D, C)[:, 1]),
            Pair(mine.out_proj.weight, theirs.o_proj.weight),
        ]
        if mine.query_rank is None:
            return [*found, Pair(mine.W_query.weight, theirs.q_proj.weight)]
        if isinstance(mine, DeepSeekSparseAttention):
            found += pairs_of_indexer(mine, theirs.indexer)
        return [
            *found,
            Pair(mine.W_query_down.weight, theirs.q_a_proj.weight),
            Pair(mine.query_norm.weight, theirs.q_a_layernorm.weight),
            Pair(mine.W_query.weight, theirs.q_b_proj.weight),
        ]
    if isinstance(mine, GatedDeltaNet) and recipe == "olmo_hybrid":
        names = {"query": "q", "key": "k", "value": "v", "gate": "g", "decay": "a", "beta": "b"}
        weights = {f"W_{own}": f"{other}_proj" for own, other in names.items()}
        return [
            *(
                Pair(getattr(mine, own).weight, getattr(theirs, other).weight)
                for own, other in (weights | {"out_proj": "o_proj"}).items()
            ),
            Pair(mine.conv.weight_C1K, theirs.conv1d.weight),
            Pair(mine.a_log_H, theirs.A_log),
            Pair(mine.decay_bias_H, theirs.dt_bias),
            Pair(mine.gain_V, theirs.o_norm.weight),
        ]
    if isinstance(mine, GatedDeltaNet):
        # Their rows of a key head: D of queries, D of keys, 2 D of values, 2 D of gates.
        def rows(start: int, size: int) -> Callable[[Tensor], Tensor]:
            return lambda w: w.unflatten(0, (H, -1))[:, start : start + size]

        together, small = theirs.in_proj_qkvz.weight, theirs.in_proj_ba.weight
        return [
            Pair(mine.W_query.weight, together, rows(0, D)),
            Pair(mine.W_key.weight, together, rows(D, D)),
            Pair(mine.W_value.weight, together, rows(2 * D, 2 * D)),
            Pair(mine.W_gate.weight, together, rows(4 * D, 2 * D)),
            Pair(mine.W_beta.weight, small, rows(0, 2)),
            Pair(mine.W_decay.weight, small, rows(2, 2)),
            Pair(mine.conv.weight_C1K, theirs.conv1d.weight),
            Pair(mine.a_log_H, theirs.A_log),
            Pair(mine.decay_bias_H, theirs.dt_bias),
            Pair(mine.gain_V, theirs.norm.weight),
            Pair(mine.out_proj.weight, theirs.out_proj.weight),
        ]
    found = projections(mine, theirs)
    if recipe == "minimax":  # the middle quarters of a head change places: see `release`
        swapped = lambda w: w.view(-1, 2, 2, D // 4, E).transpose(1, 2)  # noqa: E731
        turned = ((mine.W_query.weight, theirs.q_proj), (mine.W_key.weight, theirs.k_proj))
        found += [Pair(one, other.weight, swapped) for one, other in turned]
    if isinstance(mine, DifferentialAttention):
        # The halves of a value are neighbours here, and G / 2 heads apart there.
        apart = lambda w: w.view(2, mine.num_kv_heads // 2, D, E).transpose(0, 1)  # noqa: E731
        found.append(Pair(mine.W_value.weight, theirs.v_proj.weight, apart))
        found.append(Pair(mine.norm_gain, theirs.groupnorm.weight))
        for name in ("q1", "k1", "q2", "k2"):
            own, other = f"lambda_{name}_D", f"lambda_{name}"
            found.append(Pair(mine.get_parameter(own), theirs.get_parameter(other)))
    parts = getattr(mine, "parts", {})
    if "qk_norm" in parts and recipe != "llama4":  # whose norm has no gain
        less = 1.0 if recipe in ("gemma3", "qwen3_next") else 0.0  # their gains are 1 + w
        for gain, norm in (("q_gain_D", theirs.q_norm), ("k_gain_D", theirs.k_norm)):
            found.append(Pair(parts["qk_norm"].get_parameter(gain), norm.weight, less=less))
    if "sink" in parts:
        found.append(Pair(parts["sink"].sink_H, theirs.sinks))
    if "gate" in parts and recipe == "trinity":
        found.append(Pair(parts["gate"].W_gate.weight, theirs.gate_proj.weight))
    elif "gate" in parts:  # theirs holds, head by head, D rows of queries and D of gates
        for i, weight in enumerate((mine.W_query.weight, parts["gate"].W_gate.weight)):
            part = lambda w, i=i: w.view(H, 2, D, E)[:, i]  # noqa: E731
            found.append(Pair(weight, theirs.q_proj.weight, part))
    return [*{id(pair.mine): pair for pair in found}.values()]  # the last one for each


def release(
    recipe: str, layers: int, **changes: Any
) -> tuple[list[nn.Module], list[Callable[[Tensor], Tensor]]]:
    """transformers' attentions of one round, and each as a function of x alone."""
    home, start, own = RELEASES[recipe]
    modeling = import_module(f"transformers.models.{home}.modeling_{home}")
    make = getattr(import_module("transformers"), f"{start}Config")
    turning = getattr(modeling, f"{start}RotaryEmbedding", None)
    start = start.replace("3Text", "3")
    turning = turning or getattr(modeling, f"{start}RotaryEmbedding", None)
    sizes = SIZES | {"hidden_size": E, "head_dim": D}
    with keep_float64():
        config = make(**(sizes | {"num_hidden_layers": layers} | own | changes))
        kinds = getattr(config, "layer_types", None) or [FULL] * layers
        linear = [getattr(modeling, f"{start}{end}", None) for end in ENDS]
        turning = turning and recipe not in ("granite4", "kimi_linear") and turning(config)
        if recipe == "minimax":  # theirs turns whole heads, the release half of each
            config.head_dim //= 2
            turning = half_of(type(turning)(config))
            config.head_dim *= 2
        at, modules, calls = torch.arange(T)[None], [], []
        for i, kind in enumerate(kinds):
            given: dict[str, Any] = {"attention_mask": None}
            if kind in (LINEAR_LAYERS, "mamba", "conv"):
                module = next(one for one in linear if one)(config, layer_idx=i)
                if recipe == "minimax":
                    given["position_embeddings"] = None
            else:
                module = getattr(modeling, f"{start}Attention")(config, layer_idx=i)
                local = kind == LOCAL or recipe == "mistral"
                make = create_chunked_causal_mask if kind == "chunked_attention" else None
                given = {"attention_mask": mask(config, local, make)}
                if turning:
                    by_kind = [kind] if recipe in ("olmo3", "gemma3", "mimo_v2_flash") else []
                    given["position_embeddings"] = turning(torch.zeros(B, T, E), at, *by_kind)
                for usual, own_name in NAMES.get(recipe, {}).items():
                    setattr(module, usual, module.get_submodule(own_name))
            if recipe == "diffllama":  # has no gain: it gets one, as the authors' own code has it
                module.groupnorm = nn.RMSNorm(2 * D, eps=EPS)
            modules.append(module)
            calls.append(partial(call, module, **given))
    return modules, calls


def half_of(turning: nn.Module) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return positions that turn a head's first and third quarter together, and not the others."""

    def turn(x: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = (one.unflatten(-1, (2, -1)) for one in turning(x, at))
        still = cos.new_ones(cos.shape)
        return torch.cat([cos, still], -1).flatten(-2), torch.cat([sin, 0 * still], -1).flatten(-2)

    return turn


def call(module: nn.Module, x: Tensor, **given: Any) -> Tensor:
    """Return the output of theirs, in float64."""
    with keep_float64():
        y = module(x, **given)
    return y[0] if isinstance(y, tuple) else y


# Slow: their mechanisms, parts and positions are those of other recipes.
HELD_ELSEWHERE = {"llama3", "mistral", "qwen3", "smollm3", "gemma2", "granite4"}


@pytest.mark.parametrize("recipe", slow_but({*RELEASES} - HELD_ELSEWHERE, [*RELEASES]))
def test_a_recipe_is_its_release_in_outputs_gradients_and_decoding(recipe):
    assert_release(recipe, build(recipe, *CHANGED.get(recipe, ())))


def test_heads_may_have_a_size_of_their_own():
    assert_release("gpt_oss", build("gpt_oss", "attn.head_dim=10"), head_dim=10)


def assert_release(recipe: str, mine: list[Attention], **changes: Any) -> None:
    theirs, calls = release(recipe, len(mine), **changes)
    pairs = (pairs_of(one, other, recipe) for one, other in zip(mine, theirs, strict=True))
    assert_agreement(mine, calls, [*chain(*pairs)])


def test_every_recipe_has_a_release():
    # GPT-2 is compared whole, in tests/weights; Qwen3.5 has the layers of Qwen3-Next.
    others = {"gpt2", "qwen3_5"}
    assert {file.stem for file in (CONF / "recipe").glob("*.yaml")} == {*RELEASES} | others
