"""RWKV-7: its recurrence in chunks, and the layer as the paper defines it, token by token."""

from collections.abc import Callable
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
from building import build_gpt, disturb
from contract import assert_agree, assert_same, draw
from test_recurrence import chunked, drawn
from torch import Tensor, nn
from torch.nn.functional import group_norm, normalize

from gptattn.attention import RWKV7, Shared

B, T, H, D, V = 2, 11, 3, 5, 7
C = H * D
VALUES = "rwkv7_values"


def recurrent(inputs: list[Tensor], s: Tensor) -> tuple[Tensor, Tensor]:
    """By a matrix for each token: S = (diag(exp g) + b a^T) S + k v^T."""
    y = []
    for q, k, v, g, a, b in zip(*(x.unbind(2) for x in inputs), strict=True):
        change = torch.diag_embed(g.exp()) + torch.einsum("bhi,bhj->bhij", b, a)
        s = change @ s + torch.einsum("bhi,bhj->bhij", k, v)
        y.append(torch.einsum("bhi,bhij->bhj", q, s))
    return torch.stack(y, 2), s


def test_the_recurrence_is_that_of_fla():
    file = Path(find_spec("fla").submodule_search_locations[0])
    file = file / "ops" / "generalized_delta_rule" / "dplr" / "naive.py"  # which needs no GPU
    spec = spec_from_file_location("naive", file)
    naive = module_from_spec(spec)
    spec.loader.exec_module(naive)
    inputs = [x.float().requires_grad_() for x in drawn(13, False, True, True)]
    q, k, v, g, a, b = inputs
    s = torch.randn(B, q.shape[1], D, V)
    expected = naive.dplr_recurrence(D**0.5 * q, k, v, a, b, g, initial_state=s)
    assert_agree(chunked(inputs, s, 4), expected, inputs, atol=1e-5)


def adapted(low: nn.Module, x: Tensor, act: Callable[[Tensor], Tensor] = torch.clone) -> Tensor:
    bias = 0 if low.bias_C is None else low.bias_C
    return bias + act(x @ low.down.weight.T) @ low.up.weight.T


def defined(layer: RWKV7, x: Tensor, first: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The layer by the paper's formulas, and its values; `first` are the first layer's."""
    before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
    of_r, of_w, of_k, of_v, of_a, of_g = (
        (1 - mu) * x + mu * before for mu in layer.mix_X11E.flatten(1)
    )
    r, k, v = layer.W_query(of_r), layer.W_key(of_k), layer.W_value(of_v)
    g = -torch.exp(torch.tensor(-0.5).double()) * adapted(layer.decay, of_w, torch.tanh).sigmoid()
    rate = adapted(layer.removal, of_a).sigmoid()
    if first is not None:
        nu = adapted(layer.residual, of_v).sigmoid()
        v = (1 - nu) * v + nu * first
    kappa = k * layer.removal_gain_C
    k = (1 - layer.write_gain_C) * k + layer.write_gain_C * rate * k
    r, k, g, kappa, rate, heads, bonus = (
        y.unflatten(-1, (H, D)) for y in (r, k, g, kappa, rate, v, layer.bonus_C)
    )
    kappa = normalize(kappa, dim=-1)
    inputs = [y.transpose(1, 2) for y in (r, k, heads, g, -kappa, rate * kappa)]
    y, _ = recurrent(inputs, x.new_zeros(len(x), H, D, D))
    y = y.transpose(1, 2).reshape(-1, C)
    y = group_norm(y, H, layer.gain_C, layer.bias_C, 6.4e-4).view_as(x)
    y = y + ((r * k * bonus).sum(-1, keepdim=True) * heads).flatten(2)
    return layer.out_proj(y * adapted(layer.gate, of_g, torch.sigmoid)), v


@pytest.mark.parametrize("residual", [True, False])
def test_layers_are_the_papers_formulas_in_outputs_and_gradients(residual):
    given = {"chunk": 4, "num_layers": 3, "value_residual": residual}
    one, two = (RWKV7(C, C, T, H, layer=n, provided=[VALUES] * n, **given) for n in (0, 1))
    both, x = nn.ModuleList([one, two]).double(), draw(B, T, C).requires_grad_()
    disturb(both, std=0.3)
    first, values = defined(one, x)
    expected = first, defined(two, x, values if residual else None)[0]
    shared = Shared(range(T))
    found = [layer(x, None, shared) for layer in both]
    assert_agree(found, expected, [x, *both.parameters()])


def test_a_patterns_first_rwkv7_layer_provides_values_if_later_ones_follow():
    for pattern, mixes in (("[gqa,rwkv7,rwkv7]", [False, True]), ("[rwkv7,gqa,gqa]", [False])):
        model = build_gpt(f"pattern={pattern}", "position=none", "model.num_layers=3")
        found = [one.attention for one in model.layers() if isinstance(one.attention, RWKV7)]
        assert [one.mixes for one in found] == mixes


@torch.no_grad()
def test_it_starts_with_the_authors_values():
    layer = RWKV7(64, 64, T, 4, layer=1, num_layers=5, provided=[VALUES])
    layer.initialise(0.02)
    n, linear, zigzag = 37, 37 / 63 - 0.5, -((2.5 / 7.5) ** 2)  # channel 5 of 16 of its head
    expected = {
        "decay.bias_C": -6 + 6 * (n / 63) ** (1 + 0.25**0.3) + 0.5 + 2.5 * zigzag,
        "removal.bias_C": -0.19 + 0.3 * zigzag + 0.4 * linear,
        "residual.bias_C": 0.73 - 0.4 * linear,
        "removal_gain_C": 0.71 - 0.1 * linear,
        "write_gain_C": 1.02,
        "bonus_C": -0.04,
        "gain_C": 0.4**0.7,
    }
    own = layer.state_dict()
    assert {name: own[name][n].item() for name in expected} == pytest.approx(expected, rel=1e-5)
    shares = [1 - (n / 64) ** (0.8 * p) for p in (0.2, 0.9, 0.7, 0.7, 0.9, 0.2)]
    assert_same(own["mix_X11E"][:, 0, 0, n].tolist(), shares, 1e-6)
    for low in (layer.decay, layer.removal, layer.residual, layer.gate):
        assert not low.down.weight.any()
        assert low.up.weight.std().item() == pytest.approx(0.1 / 8, rel=0.2)
