"""Parts against transformers' layers that have them."""

from dataclasses import replace

import torch
from building import disturb
from hugging import (
    SIZES,
    B,
    D,
    E,
    G,
    H,
    Pair,
    T,
    assert_agreement,
    keep_float64,
    mask,
    projections,
    rope,
)
from torch import Tensor, nn
from transformers import HunYuanDenseV1Config, MiMoV2FlashConfig
from transformers.models.hunyuan_v1_dense import modeling_hunyuan_v1_dense as hunyuan
from transformers.models.mimo_v2_flash import modeling_mimo_v2_flash as mimo

from gptattn.attention import GroupedQueryAttention, SoftmaxAttention
from gptattn.attention.parts.qk_norm import QKNorm
from gptattn.build.model import build_layer
from gptattn.position import RotaryPosition
from gptattn.settings.compose import settings


def test_a_norm_after_the_rotation_is_hunyuans():
    position = RotaryPosition(T, D)
    mine = GroupedQueryAttention(E, E, T, H, G, out_bias=False, position=position).double()
    norm = QKNorm(D, 1e-5, after="rotation").double()
    mine.add_part("qk_norm", norm)
    disturb(mine, std=0.3)
    with keep_float64():
        config = HunYuanDenseV1Config(**SIZES, rope_parameters=rope())
        theirs = hunyuan.HunYuanDenseV1Attention(config, layer_idx=0)
        turned = hunyuan.HunYuanDenseV1RotaryEmbedding(config)(
            torch.zeros(B, T, E), torch.arange(T)[None]
        )
    pairs = projections(mine, theirs)
    pairs += [Pair(norm.q_gain_D, theirs.query_layernorm.weight)]
    pairs += [Pair(norm.get_parameter("k_gain_D"), theirs.key_layernorm.weight)]

    def call(x: Tensor) -> Tensor:
        with keep_float64():
            return theirs(x, turned, mask(config))[0]

    assert_agreement([mine], [call], pairs)


ROPE = "position:{rope:{base:%g}}"
NEAR = "near:{attn:{gqa:{num_kv_heads:6,window:8,out_bias:false}},part:[sink,value_scale]"
FAR = "far:{attn:{gqa:{num_kv_heads:3,out_bias:false}},part:[value_scale]"


def test_scaled_values_and_layers_of_windows_with_sinks_and_more_heads_are_mimos():
    layers = f"layers={{{NEAR},{ROPE % 1e4}}},{FAR},{ROPE % 5e6}}}}}"
    sizes = [f"model.d_model={E}", f"model.num_heads={H}", f"model.context_length={T}"]
    cfg = settings(["pattern=[near,far]", layers, *sizes, "model.qkv_bias=false"])
    cfg = replace(cfg, model=replace(cfg.model, num_layers=2))
    mine = [build_layer(cfg, {}, {}, i).double() for i in range(2)]
    disturb(nn.ModuleList(mine), std=0.3)
    turns = {"sliding_attention": rope(1e4), "full_attention": rope(5e6)}
    turns = {kind: one | {"partial_rotary_factor": 1.0} for kind, one in turns.items()}
    with keep_float64():
        config = MiMoV2FlashConfig(
            **SIZES,
            num_hidden_layers=2,
            v_head_dim=D,
            layer_types=[*turns],
            rope_parameters=turns,
            sliding_window=8,
        )
        theirs = [mimo.MiMoV2FlashAttention(config, layer_idx=i) for i in range(2)]
        turn = mimo.MiMoV2FlashRotaryEmbedding(config)
    pairs, calls = [], []
    for one, other, kind in zip(mine, theirs, turns, strict=True):
        assert isinstance(one, SoftmaxAttention)
        pairs += projections(one, other)
        if other.sinks is not None:
            pairs.append(Pair(one.get_parameter("parts.sink.sink_H"), other.sinks))

        def call(x: Tensor, other: nn.Module = other, kind: str = kind) -> Tensor:
            with keep_float64():
                turned = turn(x, torch.arange(T)[None], kind)
                return other(x, turned, mask(config, kind == "sliding_attention"))[0]

        calls.append(call)
    assert_agreement(mine, calls, pairs)
