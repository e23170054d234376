"""Parts against transformers' layers that have them."""

from typing import Any

import hugging
import torch
from building import disturb
from hugging import SIZES, D, E, G, H, Pair, T, keep_float64, mask
from torch import Tensor, nn
from transformers import InklingTextConfig, NeoMMEConfig
from transformers.models.inkling import modeling_inkling as inkling
from transformers.models.neomme import modeling_neomme as neomme

from gptattn.attention import Conv, ExclusiveSelfAttention, Gate, GroupedQueryAttention, QKNorm

ONE, FULL = {"num_hidden_layers": 1}, "full_attention"


def gqa(*parts: Any, **settings: Any) -> GroupedQueryAttention:
    made = GroupedQueryAttention(E, E, T, H, G, out_bias=False, **settings)
    for i, part in enumerate(parts):
        made.add_part(f"p{i}", part)
    disturb(made, std=0.3)
    return made.double()


def assert_is(
    mine: GroupedQueryAttention, theirs: nn.Module, seen: Tensor, own: dict[str, Tensor], *at: Any
) -> None:
    """Ours are theirs; `own`: by the names of our parts' parameters, theirs."""
    pairs = hugging.projections(mine, theirs)
    pairs += [Pair(mine.get_parameter(f"parts.{name}"), x) for name, x in own.items()]

    def call(x: Tensor) -> Tensor:
        with keep_float64():
            return theirs(x, *at, attention_mask=seen)[0]

    hugging.assert_agreement([mine], [call], pairs)


def test_learned_exclusive_attention_before_a_gate_is_neommes():
    mine = gqa(QKNorm(D, gain=False), ExclusiveSelfAttention(H, learned=True), Gate(E, H, D))
    turns = {FULL: hugging.rope(partial_rotary_factor=0.4)}
    with keep_float64():
        config = NeoMMEConfig(**SIZES, **ONE, layer_types=[FULL], rope_parameters=turns)
        theirs = neomme.NeoMMEAttention(config, layer_idx=0)
    theirs.o_proj, gate = theirs.output_projection.o_proj, theirs.output_projection.gate_proj
    own = {"p1.alpha_H": theirs.exclusive_self_attention.alpha, "p2.W_gate.weight": gate.weight}
    still = torch.ones(1, T, D).double(), torch.zeros(1, T, D).double()  # no rotation
    assert_is(mine, theirs, mask(config), own, still)


def test_convolved_keys_and_values_before_the_norm_are_inklings():
    mine = gqa(Conv(E, H, G, D, size=3), QKNorm(D, 1e-6), scale=1 / D)
    with keep_float64():
        given: dict[str, Any] = {"layer_types": ["hybrid"], "conv_kernel_size": 3}
        config = InklingTextConfig(**SIZES, **ONE, **given, rms_norm_eps=1e-6)
        theirs = inkling.InklingAttention(config, layer_idx=0)
        torch.nn.init.zeros_(theirs.rel_logits_proj.proj)  # their positions are another part
    own = {"p1.q_gain_D": theirs.q_norm.weight, "p1.k_gain_D": theirs.k_norm.weight}
    for name, one in (("k", theirs.k_sconv), ("v", theirs.v_sconv)):
        own[f"p0.convolutions.{name}.weight_C1K"] = one.conv1d.weight
    assert_is(mine, theirs, mask(config), own)
