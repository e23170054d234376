"""Mamba-2: a state space model, computed as linear attention with a decay.

In the paper's letters, a token writes x dt with B and reads with C: decayed linear attention with
q = C, k = B, v = x dt and g = dt A, plus D x. The recurrence is in `attention/recurrence.py`.
Letters besides the usual ones: H heads of values, D state size, V value size of a head, C channels
of all heads, G groups of heads that share B and C.
"""

from typing import Annotated

import torch
import torch.nn.functional as F
from msgspec import Meta
from torch import Tensor, nn

from gptattn.attention.base import Shared, divisors
from gptattn.attention.cache import Cache
from gptattn.attention.linear import Linear
from gptattn.attention.recurrence import (
    Backend,
    Chunk,
    ConvSize,
    Eps,
    RecurrentAttention,
    draw_decay_bias,
)
from gptattn.attention.softmax import split_heads


class Mamba2(RecurrentAttention):
    """A state [state_size, head_dim] per head, which decays at a rate that each token chooses.

    x [B, T, d_in] -> y [B, T, d_out]. Values (the paper's x), keys (B) and queries (C) go through a
    causal depthwise convolution with bias and SiLU. Per token and head dt = softplus(x w + bias),
    g = -exp(a_log) dt, and dt scales what is written. The outputs, with skip * v added, go through
    a gate silu(x W_gate), then an RMSNorm over each group's channels, and the output projection.

    Values have `expand` times d_out channels, in heads of `head_dim`; None: d_out / num_heads, so
    `expand` times num_heads heads. Each of `groups` groups shares queries and keys. `state_size`
    None: 2 * head_dim, like the paper's 128 with heads of 64. With `expand` 2 and one group:
    6 d^2 + 2 d (state_size + num_heads) weights and
    (2 d + 2 state_size) (conv_size + 1) + 6 num_heads + 2 d small ones. It needs no position and,
    as in the paper, has no dropout. `conv_size` None or 0: no convolution. Raises ValueError for
    impossible sizes.

    Source: Dao and Gu 2024, arXiv:2405.21060, sec. 7; initial values as in the authors' code,
    except for the projections, which start as in the other attentions.
    """

    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int,
        num_heads: int,
        *,
        state_size: Annotated[int, Meta(ge=1)] | None = None,
        groups: int = 1,
        expand: float = 2.0,
        head_dim: Annotated[int, Meta(ge=1)] | None = None,
        conv_size: ConvSize = 4,
        chunk: Chunk = 64,
        norm_eps: Eps = 1e-5,
        backend: Backend = "auto",
        out_bias: bool = True,
    ) -> None:
        super().__init__(d_in, d_out, context_length, num_heads, chunk, norm_eps, backend)
        V = self.head_dim = d_out // num_heads if head_dim is None else head_dim
        H = self.heads = round(expand * d_out / V)
        if H < 1 or abs(H * V - expand * d_out) > 1e-6:
            raise ValueError(
                f"expand={expand} makes {expand * d_out:g} channels, not a multiple of head_dim="
                f"{V}; for example, give {max(H, 1) * V / d_out}"
            )
        if groups < 1 or H % groups:
            raise ValueError(f"groups={groups} must divide {H} heads; use one of {divisors(H)}")
        N = 2 * V if state_size is None else state_size
        # The cache holds this state S [H, D, V] per row, and the convolution's last inputs.
        self.state_sizes = H, N, V
        self.groups, C = groups, H * V
        self.channels = (C, groups * N, groups * N)
        self.W_value, self.W_key, self.W_query = (
            Linear(d_in, c, bias=False) for c in self.channels
        )
        self.W_gate, self.W_step = Linear(d_in, C, bias=False), Linear(d_in, H, bias=False)
        self.conv = self.make_convolution(sum(self.channels), conv_size, bias=True)
        self.a_log_H = nn.Parameter(torch.empty(H).uniform_(1, 16).log())
        self.step_bias_H = draw_decay_bias(H)
        self.skip_H = nn.Parameter(torch.ones(H))
        self.gain_C = nn.Parameter(torch.ones(C))
        self.out_proj = Linear(C, d_out, bias=out_bias)

    def forward(
        self, x_BTE: Tensor, cache: Cache | None = None, shared: Shared | None = None
    ) -> Tensor:
        positions = self.begin(x_BTE, cache, shared).positions
        new_BTC = torch.cat([self.W_value(x_BTE), self.W_key(x_BTE), self.W_query(x_BTE)], -1)
        gate, dt = self.W_gate(x_BTE), self.W_step(x_BTE)
        new_BTC = self.convolve(new_BTC, cache, positions)
        wide = torch.promote_types(x_BTE.dtype, torch.float32)
        v, k, q = new_BTC.to(wide).split(self.channels, -1)
        with torch.autocast(x_BTE.device.type, enabled=False):
            dt_BTH = F.softplus(dt.to(wide) + self.step_bias_H.to(wide))
            g_BHT = (-self.a_log_H.to(wide).exp() * dt_BTH).mT
            q_BGTD, k_BGTD = split_heads(q, self.groups), split_heads(k, self.groups)
            v_BTHV = v.unflatten(2, (self.heads, -1))
            write_BHTV = (dt_BTH[..., None] * v_BTHV).transpose(1, 2)
            inputs = q_BGTD, k_BGTD, write_BHTV, g_BHT, None
            y_BHTV = self.recur(*inputs, cache, positions, gate.dtype)
            y_BTHV = y_BHTV.transpose(1, 2) + self.skip_H.to(wide)[:, None] * v_BTHV
            y_BTC = y_BTHV.flatten(2) * F.silu(gate.to(wide))
            y_BTGX = y_BTC.unflatten(2, (self.groups, -1))
            y_BTC = F.rms_norm(y_BTGX, y_BTGX.shape[3:], None, self.norm_eps).flatten(2)
            y_BTC = y_BTC * self.gain_C.to(wide)
        return self.out_proj(y_BTC.to(gate.dtype))
