"""transformers' attention classes as oracles: they get our weights, and must give our numbers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, masking_utils, modeling_rope_utils

from gptattn.attention import Attention
from gptattn.attention.softmax import SoftmaxAttention
from gptattn.attention.variants.gqa import GroupedQueryAttention
from gptattn.position import HeadPosition

B, T, H, G, D = 2, 11, 6, 3, 10
E = H * D
BACKENDS = pytest.mark.parametrize("backend", ["reference", "sdpa"])
# The sizes as transformers' configs call them.
SIZES: dict[str, Any] = {
    "hidden_size": E,
    "num_attention_heads": H,
    "num_key_value_heads": G,
    "head_dim": D,
    "max_position_embeddings": T,
    "attn_implementation": "eager",
}


class _Wide:
    """torch, with float64 under the name of float32."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def widen(monkeypatch: pytest.MonkeyPatch, modeling: ModuleType) -> None:
    """Replace a model's casts to float32, so that it agrees with ours to float64's precision."""
    for module in (modeling, modeling_rope_utils):
        monkeypatch.setattr(module, "torch", _Wide())
    monkeypatch.setattr(Tensor, "float", Tensor.double)


class KeepFloat64(TorchFunctionMode):
    """Puts float64 in the place of float32 in every call, whether as a dtype or as `.float()`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        wider = {torch.float32: torch.float64}
        args = tuple(wider.get(x, x) if isinstance(x, torch.dtype) else x for x in args)
        kwargs = {
            name: wider.get(x, x) if isinstance(x, torch.dtype) else x
            for name, x in (kwargs or {}).items()
        }
        return func(*args, **kwargs)


@contextmanager
def keep_float64() -> Iterator[None]:
    """Build and run a model of transformers in float64, whatever it casts to float32 inside.

    Both belong in here: what it makes in float32 beforehand, such as rotary frequencies, keeps a
    rounding of 5e-8.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with KeepFloat64():
            yield
    finally:
        torch.set_default_dtype(before)


def rope(theta: float = 10_000.0, **more: float | str) -> dict[str, float | str]:
    """transformers' rotary settings."""
    return {"rope_type": "default", "rope_theta": theta} | more


def ours(position: HeadPosition | None, **settings: Any) -> GroupedQueryAttention:
    """Our attention at these sizes, in float64."""
    settings = {"qkv_bias": False, "out_bias": False, "backend": "reference"} | settings
    return GroupedQueryAttention(E, E, T, H, num_kv_heads=G, position=position, **settings).double()


def mask(
    config: PreTrainedConfig, window: bool = False, make: Callable[..., Any] | None = None
) -> Tensor:
    """The mask that transformers' model passes to its layers: causal, with a window, or made so."""
    make = make or masking_utils.create_causal_mask
    if window:
        make = masking_utils.create_sliding_window_causal_mask
    made = make(config, torch.zeros(B, T, E).double(), None, None, allow_is_causal_skip=False)
    assert isinstance(made, Tensor)
    return made


def calling(
    theirs: nn.Module, turning: nn.Module, config: PreTrainedConfig, window: bool = False
) -> Callable[[Tensor], Tensor]:
    """Return theirs as a function of x alone, with its rotary positions and its model's mask."""
    at, seen = torch.arange(T)[None], mask(config, window)
    return lambda x: theirs(x, turning(x, at), attention_mask=seen)[0]


@dataclass(frozen=True)
class Pair:
    """A parameter of ours, and where it lies in one of theirs: `part` returns a view of it.

    Theirs holds ours minus `less`. `learns`: whether the output gives it a gradient.
    """

    mine: Tensor
    theirs: Tensor
    part: Callable[[Tensor], Tensor] = lambda x: x
    less: float = 0.0
    learns: bool = True


def projections(mine: SoftmaxAttention, theirs: nn.Module) -> list[Pair]:
    """The pairs of the four projections, as most models name them."""
    names = {"W_query": "q_proj", "W_key": "k_proj", "W_value": "v_proj", "out_proj": "o_proj"}
    pairs = [
        Pair(parameter, theirs.get_parameter(f"{names[name.split('.')[0]]}.{name.split('.')[1]}"))
        for name, parameter in mine.named_parameters()
        if name.split(".")[0] in names
    ]
    assert len(pairs) >= 4
    return pairs


def assert_agreement(
    mine: Attention,
    theirs: Callable[[Tensor], Tensor],
    pairs: Sequence[Pair],
    atol: float = 1e-12,
) -> None:
    """Copy our weights into theirs, and compare outputs and all gradients."""
    assert {id(pair.mine) for pair in pairs} == {id(p) for p in mine.parameters()}
    with torch.no_grad():
        for pair in pairs:
            pair.mine.add_(torch.randn_like(pair.mine), alpha=0.3)
            place = pair.part(pair.theirs)
            place.copy_(pair.mine.view_as(place) - pair.less)
    x = torch.randn(B, T, E, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(B, T, E, dtype=torch.float64)
    y, y_theirs = mine(x), theirs(x)
    near = {"rtol": 0, "atol": atol}
    torch.testing.assert_close(y, y_theirs, **near)
    pairs = [pair for pair in pairs if pair.learns]
    got = torch.autograd.grad(y, [x, *(pair.mine for pair in pairs)], upstream)
    wanted = torch.autograd.grad(y_theirs, [x, *(pair.theirs for pair in pairs)], upstream)
    near["atol"] *= 10  # gradients are sums over the tokens
    torch.testing.assert_close(got[0], wanted[0], **near)
    for pair, gradient, other in zip(pairs, got[1:], wanted[1:], strict=True):
        expected = pair.part(other)
        torch.testing.assert_close(gradient.view_as(expected), expected, **near)


def pairs_of_kda(mine: Any, theirs: Any) -> list[Pair]:
    """Where the parameters of our KDA lie in theirs."""
    gates = theirs.forget_gate
    return [
        Pair(mine.W_query.weight, theirs.q_proj.weight),
        Pair(mine.W_key.weight, theirs.k_proj.weight),
        Pair(mine.W_value.weight, theirs.v_proj.weight),
        Pair(mine.W_decay_down.weight, gates.f_a_proj.weight),
        Pair(mine.W_decay_up.weight, gates.f_b_proj.weight),
        Pair(mine.a_log_H, gates.A_log),
        Pair(mine.decay_bias_C, gates.dt_bias),
        Pair(mine.W_gate_down.weight, theirs.g_a_proj.weight),
        Pair(mine.W_gate_up.weight, theirs.g_b_proj.weight),
        Pair(mine.W_beta.weight, theirs.b_proj.weight),
        Pair(mine.conv.weight_C1K, theirs.conv1d.weight),
        Pair(mine.gain_V, theirs.o_norm.weight),
        Pair(mine.out_proj.weight, theirs.o_proj.weight),
    ]


def pairs_of_indexer(mine: Any, theirs: Any) -> list[Pair]:
    """Where the parameters of our indexer lie in theirs."""
    return [
        Pair(mine.W_index_query.weight, theirs.wq_b.weight, learns=False),
        Pair(mine.W_index_key.weight, theirs.wk.weight, learns=False),
        Pair(mine.index_norm.weight, theirs.k_norm.weight, learns=False),
        Pair(mine.index_norm.bias, theirs.k_norm.bias, learns=False),
        Pair(mine.W_index_weight.weight, theirs.weights_proj.weight, learns=False),
    ]


def pairs_of_mamba2(mine: Any, theirs: Any) -> list[Pair]:
    """Where the parameters of our Mamba-2 lie in theirs."""
    sizes = [mine.W_gate, mine.W_value, mine.W_key, mine.W_query, mine.W_step]
    ends = list(accumulate(W.out_features for W in sizes))
    rows = zip(sizes, [0, *ends], ends, strict=False)
    weight = theirs.in_proj.weight
    return [
        *(Pair(W.weight, weight, lambda x, a=a, b=b: x[a:b]) for W, a, b in rows),
        Pair(mine.conv.weight_C1K, theirs.conv1d.weight),
        Pair(mine.conv.bias_C, theirs.conv1d.bias),
        Pair(mine.a_log_H, theirs.A_log),
        Pair(mine.step_bias_H, theirs.dt_bias),
        Pair(mine.skip_H, theirs.D),
        Pair(mine.gain_C, theirs.norm.weight),
        Pair(mine.out_proj.weight, theirs.out_proj.weight),
    ]


def pairs_of_lightning(mine: Any, theirs: Any) -> list[Pair]:
    """Where the parameters of our lightning attention lie in theirs."""
    together = theirs.qkv_proj.weight

    def rows(which: int) -> Callable[[Tensor], Tensor]:
        """Theirs keeps the rows of a head's queries, keys and values together."""
        return lambda weight: weight.unflatten(0, (H, 3, -1))[:, which]

    return [
        Pair(mine.W_query.weight, together, rows(0)),
        Pair(mine.W_key.weight, together, rows(1)),
        Pair(mine.W_value.weight, together, rows(2)),
        Pair(mine.W_gate.weight, theirs.output_gate.weight),
        Pair(mine.gain_C, theirs.norm.weight),
        Pair(mine.out_proj.weight, theirs.out_proj.weight),
    ]
