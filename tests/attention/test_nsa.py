"""Native sparse attention by a loop written from its paper, and by fla's functions."""

import math
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from building import Allocations, build_attention, disturb, read_file
from contract import assert_agree, assert_same, draw, outputs_and_gradients
from test_combinations import decoded
from test_documents import documents, numbers
from torch import Tensor
from torch.nn.functional import gelu, pad, scaled_dot_product_attention

from gptattn.attention import Shared
from gptattn.attention.variants.nsa import NativeSparseAttention
from gptattn.build.model import add_parts
from gptattn.position import Documents, LinearBias, RotaryPosition

B, T, E, H, G, D = 2, 37, 7, 6, 2, 4
L, STRIDE, SELECT, TOP, WINDOW = 4, 2, 6, 4, 5  # seven blocks, of which four are selected
SIZES = {"d_in": E, "d_out": H * D, "context_length": T, "num_heads": H, "num_kv_heads": G}
ROPE, BIAS = RotaryPosition(T, D), LinearBias(H)
ALL = "nsa+qk_norm+gate+sink+softcap+temperature+value_residual"


def build(variant: str = "nsa", **changes: Any) -> NativeSparseAttention:
    """A layer in float64 with noise on every parameter."""
    own = {"block": L, "stride": STRIDE, "select_block": SELECT, "topk": TOP, "window": WINDOW}
    layer = build_attention(variant, **SIZES | own | changes).double()
    disturb(layer, std=0.3)
    return layer


def rotate(layer: NativeSparseAttention, x_D: Tensor, position: int) -> Tensor:
    x, at = x_D[None, None, None], range(position, position + 1)
    return x_D if layer.position is None else layer.position.rotate(x, x, at)[0][0, 0, 0]


def average(q: Tensor, k: list[Tensor], v: list[Tensor]) -> tuple[Tensor, Tensor]:
    if not k:
        return torch.zeros_like(q), q.new_zeros(0)
    p = (torch.stack(k) @ q / math.sqrt(D)).softmax(0)
    return p @ torch.stack(v), p


def defined(layer: NativeSparseAttention, x_TE: Tensor) -> Tensor:
    """One row by equations 5 to 12 of the paper, for one query after the other."""
    q_THD = layer.W_query(x_TE).unflatten(-1, (H, D))
    k, v = (W(x_TE).unflatten(-1, (3, G, D)) for W in (layer.W_key, layer.W_value))
    gate = torch.sigmoid(layer.W_branch(x_TE)).unflatten(-1, (3, H))

    def compress(i: int, tokens: Tensor) -> Tensor:
        x_X = tokens.flatten() + layer.place_I111X[i].flatten()
        return layer.W_out_IDD[i] @ gelu(layer.W_in_IDX[i] @ x_X)

    rows = []
    for t in range(len(x_TE)):
        heads, own = [], t // SELECT
        for g in range(G):
            q = [rotate(layer, q_D, t) for q_D in q_THD[t].chunk(G)[g]]
            begins = range(0, t - L + 2, STRIDE)
            k_block = [rotate(layer, compress(0, k[i : i + L, 0, g]), i + L - 1) for i in begins]
            v_block = [compress(1, v[i : i + L, 0, g]) for i in begins]
            blocks = [average(q_D, k_block, v_block) for q_D in q]
            p, scores = sum(weights.detach() for _, weights in blocks), []
            for j in range(1, own + 2):  # equation 9 counts from 1
                pairs = product(range(SELECT // STRIDE), range(L // STRIDE))
                each = [SELECT // STRIDE * j - m - n for m, n in pairs]
                scores.append(sum(float(p[i - 1]) for i in each if 1 <= i <= len(p)))
            free = sorted(range(1, own - 1), key=lambda j: (scores[j], j), reverse=True)
            chosen = {0, own - 1, own, *free[: TOP - 3]}
            tokens = [s for s in range(t + 1) if s // SELECT in chosen]
            near = [*range(max(0, t - WINDOW + 1), t + 1)]
            for h, (q_D, (y, _)) in enumerate(zip(q, blocks, strict=True), g * H // G):
                y = gate[t, 0, h] * y
                for branch, seen in ((1, tokens), (2, near)):
                    keys = [rotate(layer, k[s, branch, g], s) for s in seen]
                    y = y + gate[t, branch, h] * average(q_D, keys, [*v[seen, branch, g]])[0]
                heads.append(y)
        rows.append(torch.cat(heads))
    return layer.out_proj(torch.stack(rows))


@pytest.mark.parametrize(("position", "ties"), [(None, False), (ROPE, False), (None, True)])
def test_a_layer_matches_the_paper_in_outputs_gradients_and_decoding(position, ties):
    layer, x = build(position=position), draw(B, T, E).requires_grad_()
    if ties:  # among equal blocks, a query takes the newest
        layer.W_query.load_state_dict({k: 0 * w for k, w in layer.W_query.state_dict().items()})
    expected = torch.stack([defined(layer, row) for row in x])
    assert_agree(layer(x), expected, [x, *layer.parameters()])
    for chunks in ([1] * T, [11, 1, 1, 17, 1, 6]):
        assert_same(decoded(layer, x, torch.zeros(B).long(), chunks), expected.detach())


@pytest.mark.parametrize(
    ("variant", "position"),
    [("nsa", BIAS), ("nsa", ROPE), ("nsa+forget", None), (ALL, BIAS), (ALL, ROPE)],
)
def test_padded_rows_and_documents_are_as_rows_of_their_own(variant, position):
    layer, x = build(variant, position=position), draw(B, T, E).requires_grad_()
    rows = [(8, 29), (1, 1, 6, 26, 3)]
    together = layer(x, None, Shared(Documents.numbered(numbers(rows))))
    alone = [layer(part) for part in documents(x, rows)]
    assert_agree(documents(together, rows), alone, [x, *layer.parameters()], 1e-11)
    padding = torch.tensor([3, 29])
    whole = layer(x, None, Shared((torch.arange(T) - padding[:, None]).clamp_min(-1)))
    for chunks in ([1] * T, [2, 11, 1, 17, 1, 5]):
        padded = decoded(layer, x, padding, chunks)
        for row, first in enumerate(padding.tolist()):
            expected = layer(x[row : row + 1, first:])[0]
            assert_same(padded[row, first:], expected.detach())
            assert_same(whole[row, first:], expected)


def test_a_norm_after_the_rotation_acts_on_the_keys_of_each_branch():
    layer = build(position=ROPE)
    part = {"qk_norm": read_file("part", "qk_norm") | {"after": "rotation", "gain": False}}
    add_parts(layer, part, layer=0)
    held = layer.project_and_cache(draw(B, T, E), None, None)[1]
    for name in ("k", "k_near", "k_block"):
        length = held[name].square().mean(-1)
        assert_same(length, torch.ones_like(length), atol=1e-3)


@pytest.mark.parametrize("variant", ["nsa", "nsa+forget"])
def test_many_blocks_of_queries_choose_as_all_at_once_and_as_single_ones(variant):
    long = {"context_length": 151, "window": 0.1}
    layer, other = (build(variant, **long, backend=name) for name in ("sdpa", "reference"))
    other.load_state_dict(layer.state_dict())
    x, upstream = draw(B, 151, E).requires_grad_(), draw(B, 151, H * D)
    expected = outputs_and_gradients(other, x, upstream)
    assert_same(outputs_and_gradients(layer, x, upstream), expected, atol=1e-11)
    singly = decoded(layer, x, torch.zeros(B).long(), [139, *[1] * 12])
    assert_same(singly, expected[0].detach())


@pytest.mark.parametrize(("branch", "changes"), [(1, {"topk": 7}), (2, {"window": None})])
def test_one_branch_alone_that_sees_all_blocks_is_softmax_attention(branch, changes):
    layer, x = build(**changes), draw(B, T, E).index_fill(2, torch.tensor(0), 1.0)
    with torch.no_grad():  # gates of 1 and of 0
        layer.W_branch.weight.zero_()[:, 0] = -1e3
        layer.W_branch.weight.unflatten(0, (3, H))[branch, :, 0] = 1e3
    plain = build_attention("gqa", **SIZES).double()
    state = {name: layer.state_dict()[name] for name in plain.state_dict()}
    for name in ("W_key.weight", "W_key.bias", "W_value.weight", "W_value.bias"):
        state[name] = state[name].chunk(3)[branch]
    plain.load_state_dict(state)
    assert_agree(layer(x.requires_grad_()), plain(x), [x])
    assert_same(layer.attention_weights(x), plain.attention_weights(x))


def test_a_decoding_step_allocates_in_proportion_to_the_context():
    layer, allocated = build(context_length=2048), []
    with torch.no_grad():
        for S in (512, 2048):
            cache = layer.new_cache(1, S)
            layer(draw(1, S - 1, E), cache)
            cache.advance(S - 1)
            with Allocations() as made:
                layer(draw(1, 1, E), cache)
            allocated.append(made.bytes)
    assert allocated[1] < 5 * allocated[0]


@pytest.mark.filterwarnings("ignore:Flash Attention")
def test_branches_are_those_of_fla_where_blocks_do_not_overlap(monkeypatch):
    (folder,) = find_spec("fla").submodule_search_locations
    spec = spec_from_file_location("naive", Path(folder) / "ops" / "nsa" / "naive.py")
    naive = module_from_spec(spec)
    for name in ("fla.ops.utils", "fla.ops.utils.pooling"):  # need Triton; not used here
        monkeypatch.setitem(sys.modules, name, Mock())
    spec.loader.exec_module(naive)
    layer, x = build(block=4, stride=4, select_block=4), draw(B, T, E).requires_grad_()
    q, held, *_ = layer.project_and_cache(x, None, None)
    window = q, held["k_near"], held["v_near"], torch.ones(T, T).bool().tril().triu(1 - WINDOW)
    in_order = held["end"][0].argsort()
    blocks = [held[name][:, :, in_order].transpose(1, 2) for name in ("k_block", "v_block")]
    q, k, v = (y.transpose(1, 2) for y in (q, held["k"], held["v"]))
    chosen = naive.naive_nsa_topk(q, pad(blocks[0], (0, 0, 0, 0, 0, 1)), TOP, 4, D**-0.5)
    ys = (
        naive.naive_nsa_compression(q, *blocks, 4, D**-0.5)[0],
        naive.naive_nsa_selection(q, k, v, chosen, 4),
        scaled_dot_product_attention(*window, enable_gqa=True).transpose(1, 2),
    )
    gate = torch.sigmoid(layer.W_branch(x)).unflatten(-1, (3, H, 1))
    y = (gate * torch.stack(ys, 2)).sum(2)
    assert_agree(layer(x), layer.out_proj(y.flatten(2)), [x, *layer.parameters()], atol=1e-5)
