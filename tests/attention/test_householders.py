"""Gated DeltaNet with negative eigenvalues and several Householder steps a token (DeltaProduct)."""

from functools import partial
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
from building import disturb
from contract import assert_agree, assert_same, decode, draw
from hugging import Pair, assert_agreement, keep_float64
from test_documents import documents, numbers
from torch import Tensor, nn
from torch.nn.functional import conv1d, normalize, pad, rms_norm, silu, softplus
from torch.utils.flop_counter import FlopCounterMode
from transformers import OlmoHybridConfig
from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridGatedDeltaNet

from gptattn.attention import GatedDeltaNet, Shared
from gptattn.attention.recurrence import chunked_delta, count_flops, step
from gptattn.position import Documents

B, T, H, D = 2, 11, 3, 4
E = H * D
# Steps a token, and heads of values to each of keys: a step's place in a chunk differs.
SIZES = pytest.mark.parametrize(("n", "value_heads"), [(1, 1), (2, 1), (3, 2)])


def build(n: int, value_heads: int = 1, negative: bool = True, **arguments) -> GatedDeltaNet:
    """A layer in float64 with noise on every parameter; the chunks have 4 steps."""
    how = {"expand_v": 0.5, "chunk": 4, "negative_eigenvalues": negative, "householders": n}
    how |= {"value_heads": value_heads} | arguments
    layer = GatedDeltaNet(E, E, T, H, **how).double()
    disturb(layer, std=0.3)
    return layer


def convolved(layer: GatedDeltaNet, x: Tensor) -> list[Tensor]:
    """Queries, keys and values after their convolutions."""
    found, weights = [], layer.conv.weight_C1K.split(layer.channels)
    for project, weight in zip((layer.W_query, layer.W_key, layer.W_value), weights, strict=True):
        x_BCT = pad(project(x).mT, (weight.shape[-1] - 1, 0))
        found.append(silu(conv1d(x_BCT, weight, groups=len(weight))).mT)
    return found


def defined(layer: GatedDeltaNet, x: Tensor, negative: bool, n: int, heads: int) -> Tensor:
    """The layer by its definition: a matrix for each token, I - beta k k^T for each step."""
    V, K = layer.value_size, H * D
    q, k, v = convolved(layer, x)
    beta = (1 + negative) * torch.sigmoid(layer.W_beta(x))
    decay = (-layer.a_log_H.exp() * softplus(layer.W_decay(x) + layer.decay_bias_H)).exp()
    rows = []
    for b in range(B):
        of_heads = []
        for h in range(H * heads):
            s, own = x.new_zeros(D, V), slice(h // heads * D, h // heads * D + D)
            outputs = []
            for t in range(T):
                s = decay[b, t, h] * s
                for i in range(n):
                    key = k[b, t, i * K : (i + 1) * K][own]
                    key = key / (key.square().sum() + 1e-6).sqrt()
                    value = v[b, t, i * H * heads * V :][h * V : (h + 1) * V]
                    size = beta[b, t, i * H * heads + h]
                    s = (torch.eye(D) - size * key.outer(key)) @ s + size * key.outer(value)
                query = q[b, t, own]
                outputs.append(query / (query.square().sum() + 1e-6).sqrt() / D**0.5 @ s)
            of_heads.append(rms_norm(torch.stack(outputs), [V], layer.gain_V, layer.norm_eps))
        rows.append(torch.cat(of_heads, -1))
    return layer.out_proj(torch.stack(rows) * silu(layer.W_gate(x)))


@SIZES
@pytest.mark.parametrize("negative", [False, True])
def test_a_layer_is_its_product_of_matrices_in_outputs_and_gradients(n, value_heads, negative):
    layer, x = build(n, value_heads, negative), draw(B, T, E).requires_grad_()
    expected = defined(layer, x, negative, n, value_heads)
    assert_agree(layer(x), expected, [x, *layer.parameters()])


@SIZES
@pytest.mark.parametrize("conv_size", [None, 4])
def test_decoding_matches_the_whole_row(n, value_heads, conv_size):
    layer, x = build(n, value_heads, conv_size=conv_size), draw(B, T, E)
    assert_same(decode(layer, x, [3, 1, 5, 1, 1]), layer(x))


@SIZES
def test_documents_and_padded_rows_are_as_rows_of_their_own(n, value_heads):
    layer, x = build(n, value_heads), draw(B, T, E)
    rows = [(4, 7), (1, 1, 2, 6, 1)]
    together = layer(x, None, Shared(Documents.numbered(numbers(rows))))
    alone = [layer(part) for part in documents(x, rows)]
    assert_same(documents(together, rows), alone)
    late = torch.arange(T).expand(B, T) - 5  # the first five are missing
    assert_same(layer(x, None, Shared(late))[:, 5:], layer(x[:, 5:]))


@SIZES
def test_costs_are_those_of_the_steps(n, value_heads):
    layer = build(n, value_heads, out_bias=False)
    V, states = layer.value_size, H * value_heads
    values = states * V
    matrices = E * (E + n * E + n * values + 2 * values + states + n * states)
    small = 4 * (E + n * E + n * values) + 2 * states + V
    assert sum(p.numel() for p in layer.parameters()) == matrices + small
    cache = layer.new_cache(1, T)
    assert cache.nbytes == 8 * (states * D * V + 3 * (E + n * E + n * values))
    # A token decays the state and reads it once, and corrects it n times.
    assert layer.flops(1, T) == states * D * V * (1 + 2 + 4 * n)
    with FlopCounterMode(display=False) as counter:
        layer(draw(1, T, E))
    N = -(-T * n // 4)
    C = -(-T * n // N)
    solve = states * N * C * (C - 1) * (V + D)  # which torch does not count
    assert layer.flops(T, T) - solve + 2 * T * matrices == counter.get_total_flops()
    assert layer.flops(T, T) == count_flops(T * n, 4, states, D, V, delta=True)


def test_each_step_starts_with_weights_of_the_same_size():
    layer = GatedDeltaNet(128, 128, T, 2, householders=3)
    with torch.no_grad():
        layer.initialise(0.02)
    for of_steps in (layer.W_key, layer.W_value, layer.W_beta):
        for weight in of_steps.weight.chunk(3):
            assert weight.std().item() == pytest.approx(0.02, rel=0.2)


def test_reflections_track_a_parity_and_a_permutation_over_256_tokens():
    bits = torch.randint(2, (1, 1, 256))
    k = torch.tensor([1.0, 0.0]).expand(1, 1, 256, 2)
    nothing, state = torch.zeros(1, 1, 256), torch.eye(2)[None, None]
    y, _ = chunked_delta(k, k, 0 * k, nothing, 2.0 * bits, state, 32)
    assert_same(y[0, 0, :, 0], 1.0 - 2 * (bits[0, 0].cumsum(0) % 2), atol=1e-5)
    # Two transpositions a token, each a reflection along e_i - e_j, are any product of three.
    pairs = torch.tensor([[0, 1], [1, 2], [0, 2]])[torch.randint(3, (512,))]
    k = normalize(torch.eye(3)[pairs[:, 0]] - torch.eye(3)[pairs[:, 1]], dim=-1)[None, None]
    beta, state = torch.full((1, 1, 512), 2.0), torch.eye(3)[None, None]
    _, last = chunked_delta(k, k, 0 * k, 0 * beta, beta, state, 32)
    order = torch.arange(3)
    for i, j in pairs.tolist():
        swap = {i: j, j: i}
        order = torch.tensor([order[swap.get(at, at)] for at in range(3)])
    assert_same(last[0, 0], torch.eye(3)[order], atol=1e-4)


@pytest.mark.parametrize("negative", [False, True])
def test_a_layer_is_that_of_olmo_hybrid(negative):
    mine = build(1, 1, negative, expand_v=2.0, out_bias=False, chunk=32)
    with keep_float64():
        config = OlmoHybridConfig(
            hidden_size=E,
            num_attention_heads=H,
            num_hidden_layers=4,
            linear_key_head_dim=D,
            linear_value_head_dim=2 * D,
            linear_allow_neg_eigval=negative,
        )
        theirs = OlmoHybridGatedDeltaNet(config, 0)
    names = {"W_query": "q", "W_key": "k", "W_value": "v", "W_gate": "g", "W_decay": "a"}
    names |= {"W_beta": "b", "out_proj": "o"}
    pairs = [
        Pair(mine.get_submodule(own).weight, theirs.get_submodule(f"{other}_proj").weight)
        for own, other in names.items()
    ]
    pairs += [
        Pair(mine.conv.weight_C1K, theirs.conv1d.weight),
        Pair(mine.a_log_H, theirs.A_log),
        Pair(mine.decay_bias_H, theirs.dt_bias),
        Pair(mine.gain_V, theirs.o_norm.weight),
    ]
    assert_agreement([mine], [partial(call, theirs)], pairs)


def call(module: nn.Module, x: Tensor) -> Tensor:
    with keep_float64():
        return module(x)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_recurrence_is_that_of_fla(n):
    file = Path(find_spec("fla").submodule_search_locations[0])
    file = file / "ops" / "gated_delta_product" / "naive.py"  # of which importing needs no GPU
    spec = spec_from_file_location("naive", file)
    naive = module_from_spec(spec)
    spec.loader.exec_module(naive)
    layer, q, v = build(n), torch.randn(B, H, T, D), torch.randn(B, H, n * T, 2)
    k, beta = normalize(torch.randn(B, H, n * T, D), dim=-1), 2 * torch.rand(B, H, n * T)
    g, s = -torch.rand(B, H, T), torch.randn(B, H, D, 2)
    cache = layer.float().new_cache(B, T)
    cache.tensors["state"].copy_(s)
    y = layer.recur(q, k, v, g, beta, cache, None, torch.float32)
    given = (x.transpose(1, 2) for x in (q, k, v, g, beta))
    last = {"initial_state": s, "output_final_state": True, "num_householder": n}
    expected, state = naive.naive_recurrent_gated_delta_product(*given, 1.0, **last)
    assert_same(y.transpose(1, 2), expected, atol=1e-5)
    assert_same(cache.tensors["state"], state, atol=1e-5)
    one, s = step(q[:, :, 0], k[:, :, :n], v[:, :, :n], g[:, :, 0], beta[:, :, :n], s)
    assert_same(one, expected[:, 0], atol=1e-5)
