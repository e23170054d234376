"""Gated DeltaNet: linear attention that corrects what its state holds for a key, and forgets."""

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptattn.attention.base import Attention, Carried, check_sizes
from gptattn.attention.cache import Cache
from gptattn.attention.delta_rule import advance
from gptattn.attention.linear import Joint, Linear, Preparable, prepare
from gptattn.attention.norms import wide_rms_norm
from gptattn.attention.short_conv import ShortConvolution
from gptattn.position.base import Documents

NORM_EPS = 1e-6  # of the length of queries and keys
STEPS = (1e-3, 1e-1)  # between which softplus(decay_bias) starts


class GatedDeltaNet(Attention, Preparable):
    """A state of constant size per head, written by the gated delta rule (see `delta_rule`).

    x [B, T, d_in] -> y [B, T, d_out]. Queries, keys and values each pass a causal depthwise
    convolution and SiLU; queries and keys then have length 1. Per token and head
    g = -exp(a_log) softplus(x w_a + decay_bias) and beta = sigmoid(x w_b). The heads' outputs pass
    an RMSNorm, a gate silu(x W_gate) and the output projection.

    Queries and keys have `expand_k` times d_out channels, values and gate `expand_v` times. With
    1 and 1, heads are as large as in the model's other attentions: 5 d^2 + 2 d H weights, and
    3 d conv_size + 2 H + D small ones. The authors' code has 0.75 and 1.5, thus 6 d^2. It needs
    no position, and it has no dropout, as in the paper. `conv_size` None or 0: no convolutions.
    Raises ValueError for impossible sizes.

    Source: Yang et al. 2024, arXiv:2412.06464, sec. 3.1 and 3.4; initial values as in the authors'
    fla library.
    """

    knows_order: ClassVar[bool] = True
    keeps_documents: ClassVar[bool] = True

    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int,
        num_heads: int,
        conv_size: int | None = 4,
        expand_k: float = 1.0,
        expand_v: float = 1.0,
        chunk: int = 64,
        norm_eps: float = 1e-5,
        out_bias: bool = True,
    ) -> None:
        super().__init__()
        check_sizes(d_out, num_heads, num_heads, 0.0)
        if conv_size is not None and conv_size > context_length:
            raise ValueError(f"conv_size={conv_size} is above {context_length=}; 4 is usual")
        if chunk < 1:
            raise ValueError(f"chunk={chunk} must be 1 or more tokens; 64 is usual")
        if not 0.0 < norm_eps < math.inf:
            raise ValueError(f"norm_eps={norm_eps} must be a positive number; 1e-5 is usual")
        self.d_in, self.d_out, self.context_length = d_in, d_out, context_length
        self.num_heads, self.chunk, self.norm_eps = num_heads, chunk, norm_eps
        self.key_size = _size("expand_k", expand_k, d_out // num_heads)
        self.value_size = _size("expand_v", expand_v, d_out // num_heads)
        keys, values = num_heads * self.key_size, num_heads * self.value_size
        self.channels = (keys, keys, values)
        self.W_query, self.W_key = (Linear(d_in, keys, bias=False) for _ in range(2))
        self.W_value, self.W_gate = (Linear(d_in, values, bias=False) for _ in range(2))
        self.W_decay, self.W_beta = (Linear(d_in, num_heads, bias=False) for _ in range(2))
        self._joint = Joint()
        self.conv = ShortConvolution(sum(self.channels), conv_size or 0)
        # exp(a_log) from 0 to 16; at 0 itself the logarithm would be infinite.
        self.a_log_H = nn.Parameter(torch.empty(num_heads).uniform_(0.01, 16).log())
        low, high = map(math.log, STEPS)
        step_H = torch.empty(num_heads).uniform_(low, high).exp()
        self.decay_bias_H = nn.Parameter(step_H.expm1().log())  # softplus of it is step_H
        self.gain_V = nn.Parameter(torch.ones(self.value_size))
        self.out_proj = Linear(values, d_out, bias=out_bias)

    def projections(self) -> list[nn.Linear]:
        """Return the layers that read x; the first three are those of queries, keys and values."""
        keys = self.W_query, self.W_key
        return [*keys, self.W_value, self.W_gate, self.W_decay, self.W_beta]

    def prepare(self, rows: int | None) -> None:
        self._joint.prepare(self.projections(), rows)
        prepare(self.out_proj, rows)

    def forward(
        self, x_BTE: Tensor, cache: Cache | None = None, carried: Carried | None = None
    ) -> Tensor:
        positions = self.begin(x_BTE, cache, carried).positions
        *qkv, gate, decay, beta = self._joint(x_BTE, self.projections())
        start_BT = positions.start_BT if isinstance(positions, Documents) else None
        there = (positions >= 0).unsqueeze(-1) if isinstance(positions, Tensor) else None
        new_BTC = torch.cat(qkv, -1) if there is None else torch.cat(qkv, -1) * there
        held = _tensors(cache)
        q, k, v = F.silu(self.conv(new_BTC, held.get("tail"), start_BT)).split(self.channels, -1)
        wide = torch.promote_types(x_BTE.dtype, torch.float32)
        # A state that gathers thousands of small steps needs more digits than 16 bits have.
        with torch.autocast(x_BTE.device.type, enabled=False):
            rate_BTH = F.softplus(decay.to(wide) + self.decay_bias_H.to(wide))
            g_BHT = (-self.a_log_H.to(wide).exp() * rate_BTH).mT
            beta_BHT = beta.to(wide).sigmoid().mT
            if there is not None:  # a missing token neither decays nor changes the state
                g_BHT, beta_BHT = g_BHT * there.mT, beta_BHT * there.mT
            q_BHTD = _unit(self._heads(q.to(wide))) * self.key_size**-0.5
            k_BHTD, v_BHTV = _unit(self._heads(k.to(wide))), self._heads(v.to(wide))
            inputs = q_BHTD, k_BHTD, v_BHTV, g_BHT, beta_BHT
            y_BHTV = advance(inputs, held.get("state"), self.chunk, start_BT)
            y_BTHV = wide_rms_norm(y_BHTV.transpose(1, 2), self.gain_V, self.norm_eps)
        return self.out_proj(y_BTHV.flatten(2).to(gate.dtype) * F.silu(gate))

    def _heads(self, x_BTC: Tensor) -> Tensor:
        return x_BTC.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def new_cache(self, batch: int, capacity: int) -> Cache:
        w = self.W_query.weight
        wide = torch.promote_types(w.dtype, torch.float32)
        state = w.new_zeros(batch, self.num_heads, self.key_size, self.value_size, dtype=wide)
        return Cache({"state": state} | self.conv.new_tail(batch))

    def flops(self, T: int, S: int) -> int:
        # A token's decay of D x V numbers; as multiply-adds k^T S, the correction and q^T S.
        return 7 * T * self.num_heads * self.key_size * self.value_size

    def residual_writer(self) -> nn.Linear | None:
        return self.out_proj


def _tensors(cache: Cache | None) -> dict[str, Tensor]:
    if cache is None:
        return {}
    if not isinstance(cache, Cache) or "state" not in cache.tensors:
        raise TypeError(f"{type(cache).__name__} is not this module's; use new_cache()")
    return cache.tensors


def _unit(x: Tensor) -> Tensor:
    """Return x with length 1 on the last axis, or less where it is near zero."""
    return x * (x.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()


def _size(name: str, expand: float, head_dim: int) -> int:
    """Return head_dim * expand. Raises ValueError if it is not a positive whole number."""
    size = round(expand * head_dim) if math.isfinite(expand * head_dim) else 0
    if size < 1 or abs(size - expand * head_dim) > 1e-6:
        made = f"{name}={expand} makes heads of {expand * head_dim:g}"
        raise ValueError(f"{made}; give a multiple of 1/{head_dim} above 0")
    return size
