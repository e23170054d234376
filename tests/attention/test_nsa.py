"""Native sparse attention by a loop written from its paper, and by fla's functions."""

import math
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from building import build_attention, disturb
from contract import assert_agree, assert_same, decode, draw
from test_combinations import decoded
from test_documents import documents, numbers
from torch import Tensor
from torch.nn.functional import gelu

from gptattn.attention import MultiHeadAttention, Shared
from gptattn.attention.base import Attention
from gptattn.attention.variants.nsa import NativeSparseAttention
from gptattn.position import Documents, LinearBias, RotaryPosition

B, T, E, H, G, D = 2, 37, 7, 6, 2, 4
L, STRIDE, SELECT, TOP, WINDOW = 4, 2, 6, 4, 5  # seven blocks, of which four are selected
ROPE = RotaryPosition(T, D)
ALL = "nsa+qk_norm+gate+sink+softcap+temperature+value_residual"


def build(variant: str = "nsa", **changes: Any) -> Attention:
    """A layer in float64 with noise on every parameter."""
    sizes = {"d_in": E, "d_out": H * D, "context_length": T, "num_heads": H, "num_kv_heads": G}
    own = {"block": L, "stride": STRIDE, "select_block": SELECT, "topk": TOP, "window": WINDOW}
    layer = build_attention(variant, **sizes | own | changes).double()
    disturb(layer, std=0.3)
    return layer


def turn(layer: NativeSparseAttention, x_D: Tensor, position: int) -> Tensor:
    if layer.position is None:
        return x_D
    x = x_D[None, None, None]
    return layer.position.rotate(x, x, range(position, position + 1))[0][0, 0, 0]


def squeeze(layer: NativeSparseAttention, i: int, tokens: list[Tensor]) -> Tensor:
    hidden = gelu(layer.W_in_IDX[i] @ (torch.cat(tokens) + layer.place_I111X[i].flatten()))
    return layer.W_out_IDD[i] @ hidden


def average(q: Tensor, k: list[Tensor], v: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention of one query, and its weights."""
    if not k:
        return torch.zeros_like(q), q.new_zeros(0)
    p = (torch.stack(k) @ q / math.sqrt(D)).softmax(0)
    return p @ torch.stack(v), p


def defined(layer: NativeSparseAttention, x_TE: Tensor) -> Tensor:
    """One row by equations 5 to 12 of the paper, for one query after the other."""
    q_THD = layer.W_query(x_TE).unflatten(-1, (H, D))
    k, v = (W(x_TE).unflatten(-1, (3, G, D)) for W in (layer.W_key, layer.W_value))
    gate = torch.sigmoid(layer.W_branch(x_TE)).unflatten(-1, (3, H))
    rows = []
    for t in range(len(x_TE)):
        heads: list[Tensor] = []
        for g in range(G):
            begins = [*range(0, t - L + 2, STRIDE)]
            k_block, v_block = [], []
            for i in begins:
                raw = squeeze(layer, 0, [*k[i : i + L, 0, g]])
                k_block.append(turn(layer, raw, i + L - 1))
                v_block.append(squeeze(layer, 1, [*v[i : i + L, 0, g]]))
            of_group = range(g * H // G, (g + 1) * H // G)
            q = {h: turn(layer, q_THD[t, h], t) for h in of_group}
            blocks = {h: average(q[h], k_block, v_block) for h in of_group}
            p = sum(blocks[h][1].detach() for h in of_group)
            scores = {}
            for j in range(1, t // SELECT + 2):  # equation 9 counts from 1
                each = [
                    SELECT // STRIDE * j - m - n
                    for m in range(SELECT // STRIDE)
                    for n in range(L // STRIDE)
                ]
                scores[j - 1] = sum(float(p[i - 1]) for i in each if 1 <= i <= len(p))
            own = t // SELECT
            fixed = {0, own, max(0, own - 1)}
            free = sorted({*scores} - fixed, key=scores.__getitem__, reverse=True)
            chosen = fixed | {*free[: TOP - 3]}
            tokens = [s for s in range(t + 1) if s // SELECT in chosen]
            near = range(max(0, t - WINDOW + 1), t + 1)
            for h in of_group:
                y = gate[t, 0, h] * blocks[h][0]
                for branch, seen in ((1, tokens), (2, near)):
                    of_branch = [turn(layer, k[s, branch, g], s) for s in seen]
                    y = y + gate[t, branch, h] * average(
                        q[h], of_branch, [*v[[*seen], branch, g]]
                    )[0]
                heads.append(y)
        rows.append(torch.cat(heads))
    return layer.out_proj(torch.stack(rows))


@pytest.mark.parametrize("position", [None, ROPE])
def test_a_layer_is_that_of_the_paper_in_outputs_and_gradients_and_token_by_token(position):
    layer, x = build(position=position), draw(B, T, E).requires_grad_()
    expected = torch.stack([defined(layer, row) for row in x])
    assert_agree(layer(x), expected, [x, *layer.parameters()])
    for chunks in ([1] * T, [11, 1, 1, 17, 1, 6]):
        assert_same(decoded(layer, x, torch.zeros(B).long(), chunks), expected.detach())


@pytest.mark.parametrize("position", [None, ROPE, LinearBias(H)])
@pytest.mark.parametrize("variant", ["nsa", "nsa+forget", ALL])
def test_padded_rows_and_documents_are_as_rows_of_their_own(variant, position):
    if isinstance(position, LinearBias) and "forget" in variant:
        pytest.skip("a pair that is refused")
    layer, x = build(variant, position=position), draw(B, T, E).requires_grad_()
    rows = [(8, 29), (1, 1, 6, 26, 3)]
    together = layer(x, None, Shared(Documents.numbered(numbers(rows))))
    alone = [layer(part) for part in documents(x, rows)]
    assert_agree(documents(together, rows), alone, [x, *layer.parameters()], 1e-11)
    padding = torch.tensor([3, 29])
    late = (torch.arange(T) - padding[:, None]).clamp_min(-1)
    whole = layer(x, None, Shared(late))
    for chunks in ([1] * T, [2, 11, 1, 17, 1, 5]):
        padded = decoded(layer, x, padding, chunks)
        for row, pad in enumerate(padding.tolist()):
            expected = layer(x[row : row + 1, pad:])[0]
            assert_same(padded[row, pad:], expected.detach())
            assert_same(whole[row, pad:], expected)
