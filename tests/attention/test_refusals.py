"""Sizes and numbers that cannot work, of mechanisms, parts, positions and Muon: a line for each."""

import pytest
from building import SMALL, settings

from gptattn.build.model import build_matrix_rule, build_model
from gptattn.errors import ConfigError

DELTA, DSA, MAMBA = "attn=gated_deltanet", "attn=dsa position=rope model.num_heads=3", "attn=mamba2"
MLA = "attn=mla position=rope model.num_heads=3"  # heads of 10
ROPE = "position=rope model.num_heads=3"

# Overrides -> the beginning of the line. Six heads of five numbers, two layers, 11 tokens.
REFUSED = {
    "model.num_heads=7": "model.num_heads: num_heads=7 must divide d_out=30 (the model's width); "
    "one of [1, 2, 3, 5, 6, 10, 15, 30]",
    "attn=gqa attn.num_kv_heads=0": "attn.num_kv_heads: num_kv_heads=0 must divide num_heads=6; "
    "one of [1, 2, 3, 6]",
    "attn.dropout=1.0": "attn.dropout: dropout=1.0 must lie in [0, 1)",
    "attn.window=0": "attn.window: window=0 does not fit context_length=11; give 1 to 11 tokens",
    "attn.scale=inf": "attn.scale: scale=inf must be a positive number",
    "attn=differential model.num_heads=3": "model.num_heads: num_heads=3 must be even for "
    "differential attention, which pairs them; one of [2, 6, 10, 30]",
    "attn=differential attn.num_kv_heads=3": "attn.num_kv_heads: num_kv_heads=3 must be even for "
    "differential attention, which pairs them; one of [2, 6]",
    f"{MLA} attn.kv_rank=31": "attn.kv_rank: kv_rank=31 does not fit; give 1 to 30",
    f"{MLA} attn.query_rank=31": "attn.query_rank: query_rank=31 does not fit; give 1 to 30",
    f"{MLA} attn.rope_dim=3": "attn.rope_dim: rope_dim=3 must be even",
    f"{MLA} attn.scale=0": "attn.scale: scale=0 must be a positive number; null: the mechanism's",
    "attn=tpa attn.query_rank=0": "attn.query_rank: query_rank=0 does not fit; give 1 to 30",
    "attn=tpa attn.key_rank=31": "attn.key_rank: key_rank=31 does not fit; give 1 to 30",
    "attn=tpa attn.key_rank=null": "attn.key_rank: is null; give a whole number",
    f"{DSA} attn.topk=0": "attn.topk: topk=0 does not fit context_length=11; give 1 to 11 tokens",
    f"{DSA} attn.topk=null": "attn.topk: is null; give a number",
    f"{DSA} attn.index_heads=0": "attn.index_heads: index_heads=0 must be 1 or more, or a share",
    f"{DSA} attn.index_dim=3": "attn.index_dim: index_dim=3 must hold the rope_dim=4 numbers",
    # States
    f"{DELTA} attn.conv_size=-1": "attn.conv_size: conv_size=-1 is negative",
    f"{DELTA} attn.conv_size=12": "attn.conv_size: conv_size=12 is above context_length=11",
    f"{DELTA} attn.chunk=0": "attn.chunk: chunk=0 must be 1 or more tokens",
    f"{DELTA} attn.norm_eps=inf": "attn.norm_eps: norm_eps=inf must be a positive number",
    f"{DELTA} attn.expand_v=1.5": "attn.expand_v: expand_v=1.5 makes heads of 7.5; give a multiple "
    "of 1/5 above 0",
    f"{MAMBA} attn.state_size=0": "attn.state_size: state_size=0 must be positive",
    f"{MAMBA} attn.groups=5": "attn.groups: groups=5 must divide 12 heads; one of [1, 2, 3, 4, 6",
    f"{MAMBA} attn.head_dim=7": "attn.expand: expand=2.0 makes 60 channels, not a multiple of",
    # What layers share
    "pattern=[gqa,cross_layer]": "pattern: layer 1 needs keys and values of layer 0 (num_kv_heads="
    "1, head_dim=5, share=2), and no earlier layer provides them; put one that does before it",
    "pattern=[cross_layer,gqa]": "pattern: layer 0 provides keys and values of layer 0, and no "
    "later layer takes them; put one that does after it",
    "attn=gqa part=value_residual model.num_layers=1": "model.num_layers: layer 0 provides values, "
    "and no later layer takes them; give the model more layers",
    "pattern=[gqa,mqa] part=value_residual": "pattern: layer 1 needs values (num_kv_heads=1, "
    "head_dim=5), and layer 0 provides others (num_kv_heads=2, head_dim=5); make these the same",
    "attn=cross_layer attn.share=1": "attn.share: share=1 must be 2 or more",
    # Parts
    "part=qk_norm part.qk_norm.eps=0.0": "part.qk_norm.eps: eps=0.0 must be a small positive",
    "part=gate part.gate.granularity=rowwise": "part.gate.granularity: 'rowwise' is unknown; did "
    "you mean headwise?",
    "part=softcap part.softcap.cap=0.0": "part.softcap.cap: cap=0.0 must be a positive number",
    # Rotary positions
    f"{ROPE} position.fraction=0.0": "position.fraction: fraction=0.0 must be above 0 and at most",
    f"{ROPE} position.fraction=0.1": "position.fraction: fraction=0.1 of head_dim=10 is less than "
    "2 numbers; give 0.2 or more",
    f"{ROPE} position.base=0.0": "position.base: base=0.0 must be a positive number",
    f"{ROPE} position.base=1.0 position.stretch=2.0": "position.base: base=1.0 must be above 1",
    f"{ROPE} position.stretch=0.5": "position.stretch: stretch=0.5 must be 1.0 (none) or more",
    f"{ROPE} position.original_context=8": "position.original_context: original_context=8 has no "
    "effect with stretch=1.0",
    f"{ROPE} position.original_context=0 position.stretch=2.0": "position.original_context: "
    "original_context=0 must be 1 or more tokens",
    # Muon
    "optim=muon optim.matrices.momentum=1.0": "optim.matrices.momentum: momentum=1.0 is out of",
    "optim=muon optim.matrices.steps=8": "optim.matrices.steps: steps=8 is out of range; give 1 ",
}


def build(*overrides: str) -> None:
    cfg = settings(*SMALL, *overrides)
    build_model(cfg, 13)
    build_matrix_rule(cfg)


@pytest.mark.parametrize("overrides", REFUSED)
def test_what_cannot_work_is_refused_in_one_line_that_names_it(overrides):
    with pytest.raises(ConfigError) as refusal:
        build(*overrides.split())
    assert str(refusal.value).startswith(REFUSED[overrides])
    assert "\n" not in str(refusal.value)
