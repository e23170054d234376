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
from transformers import (
    HunYuanDenseV1Config,
    InklingTextConfig,
    MiMoV2FlashConfig,
    NeoMMEConfig,
)
from transformers.models.hunyuan_v1_dense import modeling_hunyuan_v1_dense as hunyuan
from transformers.models.inkling import modeling_inkling as inkling
from transformers.models.mimo_v2_flash import modeling_mimo_v2_flash as mimo
from transformers.models.neomme import modeling_neomme as neomme

from gptattn.attention import GroupedQueryAttention, SoftmaxAttention
from gptattn.attention.parts.conv import Conv
from gptattn.attention.parts.gate import Gate
from gptattn.attention.parts.qk_norm import QKNorm
from gptattn.attention.parts.xsa import ExclusiveSelfAttention
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


def test_learned_exclusive_attention_before_a_gate_is_neommes():
    mine = GroupedQueryAttention(E, E, T, H, G, out_bias=False).double()
    xsa, gate = ExclusiveSelfAttention(H, learned=True).double(), Gate(E, H, D).double()
    for name, part in {"norm": QKNorm(D, gain=False).double(), "xsa": xsa, "gate": gate}.items():
        mine.add_part(name, part)
    disturb(mine, std=0.3)
    kinds = {"layer_types": ["full_attention"], "num_hidden_layers": 1}
    with keep_float64():
        turns = {"full_attention": rope(partial_rotary_factor=0.4)}
        config = NeoMMEConfig(**SIZES, **kinds, rope_parameters=turns)
        theirs = neomme.NeoMMEAttention(config, layer_idx=0)
    out = theirs.output_projection
    names = {"W_query": theirs.q_proj, "W_key": theirs.k_proj, "W_value": theirs.v_proj}
    pairs = [Pair(mine.get_parameter(f"{n}.weight"), w.weight) for n, w in names.items()]
    pairs += [Pair(mine.get_parameter("out_proj.weight"), out.o_proj.weight)]
    pairs += [Pair(gate.W_gate.weight, out.gate_proj.weight)]
    pairs += [Pair(xsa.get_parameter("alpha_H"), theirs.exclusive_self_attention.alpha)]
    still = torch.ones(1, T, D).double(), torch.zeros(1, T, D).double()  # no rotation

    def call(x: Tensor) -> Tensor:
        with keep_float64():
            return theirs(x, still, mask(config))[0]

    assert_agreement([mine], [call], pairs)


def test_convolved_keys_and_values_before_the_norm_are_inklings():
    mine = GroupedQueryAttention(E, E, T, H, G, out_bias=False, scale=1 / D).double()
    conv, norm = Conv(E, H, G, D, size=3).double(), QKNorm(D, 1e-6).double()
    mine.add_part("conv", conv)
    mine.add_part("qk_norm", norm)
    disturb(mine, std=0.3)
    kinds = {"layer_types": ["hybrid"], "num_hidden_layers": 1, "conv_kernel_size": 3}
    with keep_float64():
        config = InklingTextConfig(**SIZES, **kinds, rms_norm_eps=1e-6)
        theirs = inkling.InklingAttention(config, layer_idx=0)
        torch.nn.init.zeros_(theirs.rel_logits_proj.proj)  # their positions are another part
    pairs = projections(mine, theirs)
    for name, one in (("k", theirs.k_sconv), ("v", theirs.v_sconv)):
        weight = conv.get_parameter(f"convolutions.{name}.weight_C1K")
        pairs.append(Pair(weight, one.conv1d.weight))
    pairs += [Pair(norm.q_gain_D, theirs.q_norm.weight)]
    pairs += [Pair(norm.get_parameter("k_gain_D"), theirs.k_norm.weight)]

    def call(x: Tensor) -> Tensor:
        with keep_float64():
            return theirs(x, mask(config))[0]

    assert_agreement([mine], [call], pairs)
