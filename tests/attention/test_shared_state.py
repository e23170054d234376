"""What layers pass on to later ones: cross-layer attention and the value residual."""

import pytest
import torch
from building import build_gpt, chosen, through_cache
from contract import assert_agree, assert_same
from torch import Tensor

from gptattn.decode.generate import pad_left
from gptattn.model.gpt import GPT

T = 7


def by_loop(model: GPT, ids: Tensor, share: int = 1) -> tuple[Tensor, list[Tensor]]:
    """The hidden states [B, T, E], and each layer's weights, one query head and token at a time.

    Each `share` layers have the keys and values of the first of them. Layers with the numbers of a
    value residual mix in the values of layer 0.
    """
    x, maps = model.token_embedding(ids), []
    k = v = first = torch.empty(0)
    for layer, block in enumerate(model.layers()):
        attention = block.attention
        size, heads = attention.head_dim, attention.num_heads
        normed = block.norm_attention(x)
        q = attention.W_query(normed).unflatten(-1, (heads, size))
        if layer % share == 0:
            k = attention.W_key(normed).unflatten(-1, (-1, size))
            v = attention.W_value(normed).unflatten(-1, (-1, size))
        if layer == 0:
            first = v
        elif "parts.value_residual.shares" in attention.state_dict():
            own, of_first = attention.get_parameter("parts.value_residual.shares")
            v = own * v + of_first * first
        w_BHTS = x.new_zeros(len(ids), heads, ids.shape[1], ids.shape[1])
        rows = []
        for t in range(ids.shape[1]):
            mixed = []
            for h in range(heads):
                g = h * k.shape[2] // heads
                score = torch.einsum("bd,bsd->bs", q[:, t, h], k[:, : t + 1, g]) / size**0.5
                w_BHTS[:, h, t, : t + 1] = score.softmax(-1).detach()
                mixed.append(torch.einsum("bs,bsd->bd", score.softmax(-1), v[:, : t + 1, g]))
            rows.append(torch.cat(mixed, dim=-1))
        maps.append(w_BHTS)
        x = x + attention.out_proj(torch.stack(rows, dim=1))
        x = x + block.mlp(block.norm_mlp(x))
    return model.norm(x), maps


@pytest.mark.parametrize(
    ("overrides", "share"),
    [
        (("attn=cross_layer", "attn.share=2", "attn.num_kv_heads=1"), 2),
        (("attn=cross_layer", "attn.share=3", "attn.num_kv_heads=2"), 3),
        (("attn=gqa", "part=value_residual"), 1),
    ],
)
def test_layers_use_keys_and_values_of_earlier_ones_as_a_loop_does(overrides, share):
    model = build_gpt(*overrides, "model.num_layers=4", "position=none", std=0.3).double()
    ids = torch.randint(13, (2, T))
    expected, maps = by_loop(model, ids, share)
    assert_agree(model.hidden(ids), expected, [*model.parameters()], atol=1e-11)
    assert_same(model.attention_weights(ids), maps, atol=1e-11)


def test_every_part_acts_in_sharing_layers_with_caches_windows_and_padding():
    parts = "part=[qk_norm,gate,sink,softcap,value_residual,forget]"
    given = [parts, "attn=cross_layer", "attn.window=3", "position=rope", "model.d_model=36"]
    model = build_gpt(*given, "model.num_layers=4", std=0.3).double().eval()
    names = [block.attention.state_dict().keys() for block in model.layers()]
    # Nothing for keys and values that a layer does not have.
    assert ["parts.qk_norm.k_gain_D" in own for own in names] == [True, False, True, False]
    assert ["parts.value_residual.shares" in own for own in names] == [False, False, True, False]
    ids = torch.randint(13, (2, 11))
    with torch.no_grad():
        read = model(ids)
        assert_same(through_cache(model, ids, model.new_cache(2), [5, 1, 3, 2]), read)
        prompts = [torch.randint(13, (length,)) for length in (8, 1, 5)]
        padded, padding = pad_left(prompts)
        y = through_cache(model, padded, model.new_cache(3, padding_B=padding), [2, 5, 1])
        for row, (prompt, pad) in enumerate(zip(prompts, padding, strict=True)):
            assert_same(y[row, pad:], model(prompt[None])[0])


def test_both_numbers_of_each_layer_but_the_first_start_at_a_half():
    model = build_gpt(*chosen("mha+value_residual"), "model.num_layers=3")
    states = [block.attention.state_dict() for block in model.layers()]
    shares = [state.get("parts.value_residual.shares") for state in states]
    assert shares[0] is None
    assert torch.equal(torch.stack(shares[1:]), torch.full((2, 2), 0.5))


def test_the_first_layer_that_has_values_leaves_them():
    pattern = "pattern=[gated_deltanet,gqa,gated_deltanet,gqa]"
    parts = ("part=[value_residual,gate]", "model.num_layers=4")
    model = build_gpt(pattern, *parts, "position=none", std=0.3).eval()
    ids = torch.randint(13, (2, T))
    with torch.no_grad():
        before = model(ids)
        model.layers()[1].attention.get_parameter("W_value.weight").mul_(2.0)
        assert not torch.allclose(model(ids), before)
