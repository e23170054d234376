"""transformers' attention classes as oracles: they get our weights, and must give our numbers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, masking_utils

from gptattn.attention import Attention, Shared
from gptattn.attention.softmax import SoftmaxAttention

B, T, H, G, D = 2, 11, 6, 3, 10
E = H * D
# The sizes as transformers' configs call them.
SIZES: dict[str, Any] = {
    "hidden_size": E,
    "num_attention_heads": H,
    "num_key_value_heads": G,
    "head_dim": D,
    "max_position_embeddings": T,
    "attn_implementation": "eager",
}


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
    mine: Sequence[Attention], theirs: Sequence[Callable[[Tensor], Tensor]], pairs: list[Pair]
) -> None:
    """Copy our weights into theirs, and compare outputs, gradients and decoding, layer by layer."""
    assert {id(pair.mine) for pair in pairs} == {id(p) for one in mine for p in one.parameters()}
    with torch.no_grad():
        for pair in pairs:
            place = pair.part(pair.theirs)
            place.copy_(pair.mine.view_as(place) - pair.less)
    width = mine[0].d_in
    x = torch.randn(B, T, width, dtype=torch.float64, requires_grad=True)
    y, expected, shared = x, x, Shared(range(T))
    for one, call in zip(mine, theirs, strict=True):
        normed = rms_norm(expected, [width])
        wanted = call(normed)
        assert_near(one(normed), wanted)  # by layer, and then all of them
        y, expected = y + one(rms_norm(y, [width]), None, shared), expected + wanted
    assert_near(y, expected)
    upstream = torch.randn_like(y)
    pairs = [pair for pair in pairs if pair.learns]
    got = torch.autograd.grad(y, [x, *(pair.mine for pair in pairs)], upstream)
    wanted = torch.autograd.grad(expected, [x, *(pair.theirs for pair in pairs)], upstream)
    assert_near(got[0], wanted[0])
    for pair, gradient, other in zip(pairs, got[1:], wanted[1:], strict=True):
        assert_near(gradient.view_as(pair.part(other)), pair.part(other))

    caches, steps = [one.new_cache(B, T) for one in mine], []
    with torch.no_grad():
        for t, token in enumerate(x.split(1, dim=1)):
            stream, shared = token, Shared(range(t, t + 1))
            for one, cache in zip(mine, caches, strict=True):
                stream = stream + one(rms_norm(stream, [width]), cache, shared)
                cache.advance(1)
            steps.append(stream)
    torch.testing.assert_close(torch.cat(steps, 1), expected.detach(), rtol=0, atol=1e-9)


def assert_near(got: Tensor, expected: Tensor) -> None:
    """Within 1e-10, as a share of the largest number."""
    size = max(1.0, float(expected.detach().abs().max()))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10 * size)


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


def pairs_of_short_conv(mine: Any, theirs: Any) -> list[Pair]:
    """Where the parameters of our gated short convolution lie in theirs."""
    gates = enumerate((mine.W_write, mine.W_read, mine.W_value))
    return [
        *(Pair(W.weight, theirs.in_proj.weight, lambda x, i=i: x.chunk(3)[i]) for i, W in gates),
        Pair(mine.conv.weight_C1K, theirs.conv.weight),
        Pair(mine.out_proj.weight, theirs.out_proj.weight),
    ]
