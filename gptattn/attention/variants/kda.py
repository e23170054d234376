"""Kimi Delta Attention: the gated delta rule; each key channel forgets at its own rate.

The rule, S = diag(exp(g)) S; S = S + beta k (v - S^T k)^T; o = S^T q, is in
`attention/recurrence.py`. Letters besides the usual ones: V value size of a head (here D), C
channels of all heads, H * D.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptattn.attention.base import Shared
from gptattn.attention.cache import Cache
from gptattn.attention.linear import Linear
from gptattn.attention.recurrence import (
    Backend,
    Chunk,
    ConvSize,
    Eps,
    RecurrentAttention,
    draw_decay_bias,
    scale_size,
    unit_length,
)
from gptattn.attention.softmax import split_heads, wide_rms_norm


class KimiDeltaAttention(RecurrentAttention):
    """A state of constant size per head; each key channel decays at its own rate.

    x [B, T, d_in] -> y [B, T, d_out]. Queries, keys and values each go through a causal depthwise
    convolution and SiLU; queries and keys then have length 1. Per token and channel
    g = -exp(a_log) softplus(x W_decay_down W_decay_up + decay_bias), with a_log per head; per token
    and head beta = sigmoid(x w_b). The heads' outputs go through an RMSNorm, a gate
    sigmoid(x W_gate_down W_gate_up) and the output projection.

    Heads have `expand` times d_out / num_heads channels, and maps of decay and gate have rank D:
    with 1, 4 d^2 + 4 d D + d H weights, and 3 d conv_size + d + H + D small ones. It needs no
    position and, as in the release, has no dropout. `conv_size` None or 0: no convolutions. Raises
    ValueError for impossible sizes.

    Source: Kimi Team 2025, arXiv:2510.26692, sec. 3 and 4; initial values as in transformers'
    KimiLinear.
    """

    delta: ClassVar[bool] = True
    by_channel: ClassVar[bool] = True

    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int,
        num_heads: int,
        *,
        conv_size: ConvSize = 4,
        expand: float = 1.0,
        chunk: Chunk = 32,
        norm_eps: Eps = 1e-5,
        backend: Backend = "auto",
        out_bias: bool = True,
    ) -> None:
        super().__init__(d_in, d_out, context_length, num_heads, chunk, norm_eps, backend)
        D = self.head_dim = scale_size("expand", expand, d_out // num_heads)
        # The cache holds this state S [H, D, V] per row, and the convolution's last inputs.
        self.state_sizes = num_heads, D, D
        C = num_heads * D
        self.W_query, self.W_key, self.W_value = (Linear(d_in, C, bias=False) for _ in range(3))
        self.W_decay_down, self.W_decay_up = Linear(d_in, D, bias=False), Linear(D, C, bias=False)
        self.W_gate_down, self.W_gate_up = Linear(d_in, D, bias=False), Linear(D, C, bias=False)
        self.W_beta = Linear(d_in, num_heads, bias=False)
        self.conv = self.make_convolution(3 * C, conv_size)
        self.a_log_H = nn.Parameter(torch.empty(num_heads).uniform_(1, 16).log())
        self.decay_bias_C = draw_decay_bias(C)
        self.gain_V = nn.Parameter(torch.ones(D))
        self.out_proj = Linear(C, d_out, bias=out_bias)

    def forward(
        self, x_BTE: Tensor, cache: Cache | None = None, shared: Shared | None = None
    ) -> Tensor:
        positions = self.begin(x_BTE, cache, shared).positions
        new_BTC = torch.cat([self.W_query(x_BTE), self.W_key(x_BTE), self.W_value(x_BTE)], -1)
        decay, beta = self.W_decay_up(self.W_decay_down(x_BTE)), self.W_beta(x_BTE)
        gate = self.W_gate_up(self.W_gate_down(x_BTE)).sigmoid()
        new_BTC = self.convolve(new_BTC, cache, positions)
        wide = torch.promote_types(x_BTE.dtype, torch.float32)
        q, k, v = new_BTC.to(wide).chunk(3, -1)
        with torch.autocast(x_BTE.device.type, enabled=False):
            rate_BTC = F.softplus(decay.to(wide) + self.decay_bias_C.to(wide))
            beta_BHT = beta.to(wide).sigmoid().mT
            a_H11 = self.a_log_H.to(wide).exp()[:, None, None]
            g_BHTD = -a_H11 * split_heads(rate_BTC, self.num_heads)
            q_BHTD = unit_length(split_heads(q, self.num_heads)) * self.head_dim**-0.5
            k_BHTD = unit_length(split_heads(k, self.num_heads))
            v_BHTV = split_heads(v, self.num_heads)
            inputs = q_BHTD, k_BHTD, v_BHTV, g_BHTD, beta_BHT
            y_BHTV = self.recur(*inputs, cache, positions, gate.dtype)
            y_BTHV = wide_rms_norm(y_BHTV.transpose(1, 2), self.gain_V, self.norm_eps)
        return self.out_proj(y_BTHV.flatten(2).to(gate.dtype) * gate)
