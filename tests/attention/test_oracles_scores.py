"""ALiBi against transformers' class, and forgetting attention against the paper in a loop."""

import math
from itertools import product

import pytest
import torch
from building import disturb
from hugging import B, D, E, G, H, Pair, T, assert_agreement, keep_float64
from torch import Tensor
from transformers import BloomConfig
from transformers.models.bloom import modeling_bloom

from gptattn.attention import GroupedQueryAttention, MultiHeadAttention
from gptattn.attention.parts.forget import Forget
from gptattn.position import LinearBias


@pytest.mark.parametrize("heads", [4, 6])
def test_alibi_is_blooms_also_where_heads_are_no_power_of_two(heads):
    size = E // heads
    config = BloomConfig(
        hidden_size=E, n_head=heads, attention_dropout=0.0, hidden_dropout=0.0, n_layer=1
    )
    theirs = modeling_bloom.BloomAttention(config, layer_idx=0).double()
    mine = MultiHeadAttention(E, E, T, heads, qkv_bias=True, position=LinearBias(heads)).double()
    disturb(mine, std=0.3)
    # A row for each head, then query, key and value: [heads, 3, size, ...].
    joint, bias = theirs.query_key_value.weight, theirs.query_key_value.bias
    pairs = [Pair(mine.out_proj.weight, theirs.dense.weight)]
    pairs += [Pair(mine.out_proj.bias, theirs.dense.bias)]
    for i, layer in enumerate((mine.W_query, mine.W_key, mine.W_value)):
        pairs += [
            Pair(layer.weight, joint, lambda w, i=i: w.view(heads, 3, size, E)[:, i]),
            Pair(layer.bias, bias, lambda b, i=i: b.view(heads, 3, size)[:, i]),
        ]
    future = torch.full((T, T), -math.inf, dtype=torch.float64).triu(1)

    def call(x: Tensor) -> Tensor:
        with keep_float64():
            alibi = modeling_bloom.build_alibi_tensor(torch.ones(B, T), heads, torch.float64)
            return theirs(x, torch.zeros_like(x), alibi, future)[0]

    assert_agreement([mine], [call], pairs)


def forgetting(x: Tensor, mine: GroupedQueryAttention, part: Forget) -> Tensor:
    """The paper's formula, one query at a time: o_i = sum_j w_ij v_j, w_i = softmax(q k + d_i)."""
    q_BTHD, k_BTGD, v_BTGD = (
        layer(x).unflatten(-1, (-1, D)) for layer in (mine.W_query, mine.W_key, mine.W_value)
    )
    f_BTH = 1 / (1 + torch.exp(-(x @ part.W_forget.weight.T + part.W_forget.bias)))
    y = []
    for b, i, h in product(range(B), range(T), range(H)):
        g = h // (H // G)
        d = torch.stack([f_BTH[b, j + 1 : i + 1, h].log().sum() for j in range(i + 1)])
        e = torch.exp(k_BTGD[b, : i + 1, g] @ q_BTHD[b, i, h] / math.sqrt(D) + d)
        y.append(e @ v_BTGD[b, : i + 1, g] / e.sum())
    return torch.stack(y).view(B, T, H * D) @ mine.out_proj.weight.T


def test_forgetting_attention_is_the_papers_formula():
    mine = GroupedQueryAttention(E, E, T, H, num_kv_heads=G, out_bias=False).double()
    part = Forget(E, H).double()
    mine.add_part("forget", part)
    disturb(mine, std=0.3)
    pairs = [Pair(p, p) for p in mine.parameters()]
    assert_agreement([mine], [lambda x: forgetting(x, mine, part)], pairs)
