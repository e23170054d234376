"""Sizes and numbers that cannot work, of mechanisms, parts, positions and Muon: a line for each."""

import pytest
from building import SMALL, settings
from support import refuses

from gptattn.build.model import build_matrix_rule, build_model

DELTA, DSA, MAMBA = "attn=gated_deltanet", "attn=dsa position=rope model.num_heads=3", "attn=mamba2"
MLA = "attn=mla position=rope model.num_heads=3"  # heads of 10
ROPE = "position=rope model.num_heads=3"

# Overrides -> the field, and a word on what is wrong or right. Six heads of five numbers, two
# layers, 11 tokens.
REFUSED = {
    "model.num_heads=7": "model.num_heads: [1, 2, 3, 5, 6, 10, 15, 30]",
    "attn=gqa attn.num_kv_heads=0": "attn.num_kv_heads: [1, 2, 3, 6]",
    "attn.window=0": "attn.window: 1 to 11",
    "attn.scale=inf": "attn.scale: finite",
    "attn=differential model.num_heads=3": "model.num_heads: [2, 6, 10, 30]",
    "attn=differential attn.num_kv_heads=3": "attn.num_kv_heads: [2, 6]",
    f"{MLA} attn.kv_rank=31": "attn.kv_rank: 1 to 30",
    f"{MLA} attn.query_rank=31": "attn.query_rank: 1 to 30",
    f"{MLA} attn.rope_dim=3": "attn.rope_dim: even",
    "attn=tpa attn.query_rank=0": "attn.query_rank: 1 to 30",
    "attn=tpa attn.key_rank=31": "attn.key_rank: 1 to 30",
    "attn=tpa attn.key_rank=null": "attn.key_rank: null",
    f"{DSA} attn.topk=0": "attn.topk: 1 to 11",
    f"{DSA} attn.topk=null": "attn.topk: null",
    f"{DSA} attn.index_heads=0": "attn.index_heads: 1 or more",
    f"{DSA} attn.index_dim=3": "attn.index_dim: rope_dim=4",
    "attn=nsa attn.stride=3": "attn.block: stride=3",
    "attn=nsa attn.select_block=4": "attn.select_block: 8 or more",
    "attn=nsa model.context_length=7": "attn.block: context_length=7",
    "attn=nsa attn.topk=2": "attn.topk: >= 3",
    # States
    f"{DELTA} attn.conv_size=12": "attn.conv_size: context_length=11",
    f"{DELTA} attn.chunk=0": "attn.chunk: >= 1",
    f"{DELTA} attn.expand_v=1.5": "attn.expand_v: 1.6 for 8",
    f"{DELTA} attn.householders=0": "attn.householders: >= 1",
    "attn=short_conv attn.conv_size=12": "attn.conv_size: context_length=11",
    "attn=rwkv7 attn.value_rank=-3 attn.value_residual=false": "attn.value_rank: 1 to 30",
    f"{MAMBA} attn.groups=5": "attn.groups: [1, 2, 3, 4, 6",
    f"{MAMBA} attn.head_dim=7": "attn.expand: multiple",
    # What layers share
    "pattern=[gqa,cross_layer]": "pattern: layer 1 needs",
    "pattern=[cross_layer,gqa]": "pattern: layer 0 provides",
    "attn=gqa part=value_residual model.num_layers=1": "model.num_layers: more layers",
    "pattern=[gqa,mqa] part=value_residual": "pattern: layer 1 needs",
    "pattern=[gqa,rwkv7,rwkv7] part=value_residual model.num_layers=3": "pattern: layer 0 provides",
    # Parts
    "attn=nsa part=xsa": "part: cannot take xsa",
    "part=qk_norm part.qk_norm.over=width part.qk_norm.after=rotation": "part.qk_norm.over: before",
    "part=gate part.gate.granularity=rowwise": "part.gate.granularity: headwise",
    # Rotary positions
    f"{ROPE} position.fraction=0.1": "position.fraction: 0.2 or more",
    f"{ROPE} position.base=1.0 position.stretch=2.0": "position.base: above 1",
    f"{ROPE} position.original_context=8": "position.original_context: stretch=1.0",
    # Muon
    "optim=muon optim.matrices.momentum=1.0": "optim.matrices.momentum: < 1",
    "optim=muon optim.matrices.steps=8": "optim.matrices.steps: <= 7",
}


def build(*overrides: str) -> None:
    cfg = settings(*SMALL, *overrides)
    build_model(cfg, 13)
    build_matrix_rule(cfg)


@pytest.mark.parametrize("overrides", REFUSED)
def test_what_cannot_work_is_refused_in_one_line_that_names_it(overrides):
    with refuses(REFUSED[overrides]):
        build(*overrides.split())
