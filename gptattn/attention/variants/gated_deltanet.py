"""Gated DeltaNet: linear attention that corrects what its state holds for a key, and forgets.

The gated delta rule, S = exp(g) S; S = S + beta k (v - S^T k)^T; o = S^T q, is in
`attention/recurrence.py`. Letters besides the usual ones: V value size of a head, C channels, P
Householder steps of all tokens, T * householders.
"""

from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from msgspec import Meta
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


class GatedDeltaNet(RecurrentAttention):
    """A state of constant size per head, written by the gated delta rule.

    x [B, T, d_in] -> y [B, T, d_out]. Queries, keys and values each go through a causal depthwise
    convolution and SiLU; queries and keys then have length 1. Per token and head
    g = -exp(a_log) softplus(x w_a + decay_bias) and beta = sigmoid(x w_b). The heads' outputs go
    through an RMSNorm, a gate silu(x W_gate) and the output projection.

    A token multiplies the state by exp(g) (I - beta k k^T), with an eigenvalue above 0 along k.
    With `negative_eigenvalues`, beta = 2 sigmoid(x w_b), and the eigenvalue can be nearly -1, a
    reflection, so one layer can track a parity. With `householders` n (DeltaProduct), a token
    decays the state once and takes n such steps, each with its own key, value and beta, before the
    state is read. With both, n reflections can permute n + 1 things in any way. Keys, values and
    beta then have n times the weights, and the recurrence takes n steps per token, in chunks of
    `chunk` steps; the state keeps its size.

    Queries and keys have `expand_k` times d_out channels, values and gate `expand_v` times. With
    1 and 1, heads have the size of the model's other attentions: 5 d^2 + 2 d H weights, and
    3 d conv_size + 2 H + D small ones. The authors' code has 0.75 and 1.5, so 6 d^2. A head of
    queries and keys serves `value_heads` heads of values, each with its own state; Qwen3-Next has
    2. It needs no position and, as in the paper, has no dropout. `conv_size` None or 0: no
    convolutions. Raises ValueError for impossible sizes.

    Source: Yang et al. 2024, arXiv:2412.06464, sec. 3.1 and 3.4; negative eigenvalues: Grazzi et
    al. 2024, arXiv:2411.12537; Householder steps: Siems et al. 2025, arXiv:2502.10297; initial
    values as in the authors' fla library, layers GatedDeltaNet and GatedDeltaProduct.
    """

    delta: ClassVar[bool] = True

    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int,
        num_heads: int,
        *,
        conv_size: ConvSize = 4,
        expand_k: float = 1.0,
        expand_v: float = 1.0,
        value_heads: Annotated[int, Meta(ge=1)] = 1,
        negative_eigenvalues: bool = False,
        householders: Annotated[int, Meta(ge=1)] = 1,
        chunk: Chunk = 32,
        norm_eps: Eps = 1e-5,
        backend: Backend = "auto",
        out_bias: bool = True,
    ) -> None:
        super().__init__(d_in, d_out, context_length, num_heads, chunk, norm_eps, backend)
        D = self.key_size = scale_size("expand_k", expand_k, d_out // num_heads)
        V = self.value_size = scale_size("expand_v", expand_v, d_out // num_heads)
        states = self.states = num_heads * value_heads
        # The cache holds this state S [H, D, V] per row, and the convolution's last inputs.
        self.state_sizes = states, D, V
        self.negative_eigenvalues, self.writes = negative_eigenvalues, householders
        keys, values, n = num_heads * D, states * V, householders
        self.channels = (keys, n * keys, n * values)
        self.W_query, self.W_key, self.W_value = (
            Linear(d_in, c, bias=False) for c in self.channels
        )
        self.W_gate, self.W_decay = (Linear(d_in, c, bias=False) for c in (values, states))
        self.W_beta = Linear(d_in, n * states, bias=False)
        self.conv = self.make_convolution(sum(self.channels), conv_size)
        # exp(a_log) from 0 to 16; at 0 itself the logarithm would be infinite.
        self.a_log_H = nn.Parameter(torch.empty(states).uniform_(0.01, 16).log())
        self.decay_bias_H = draw_decay_bias(states)
        self.gain_V = nn.Parameter(torch.ones(V))
        self.out_proj = Linear(values, d_out, bias=out_bias)

    def forward(
        self, x_BTE: Tensor, cache: Cache | None = None, shared: Shared | None = None
    ) -> Tensor:
        positions = self.begin(x_BTE, cache, shared).positions
        new_BTC = torch.cat([self.W_query(x_BTE), self.W_key(x_BTE), self.W_value(x_BTE)], -1)
        gate, decay, beta = self.W_gate(x_BTE), self.W_decay(x_BTE), self.W_beta(x_BTE)
        new_BTC = self.convolve(new_BTC, cache, positions)
        q, k, v = new_BTC.split(self.channels, -1)
        wide = torch.promote_types(x_BTE.dtype, torch.float32)
        with torch.autocast(x_BTE.device.type, enabled=False):
            rate_BTH = F.softplus(decay.to(wide) + self.decay_bias_H.to(wide))
            g_BTH = -self.a_log_H.to(wide).exp() * rate_BTH
            beta = beta.to(wide).sigmoid()
            if self.negative_eigenvalues:
                beta = 2 * beta
            # A token's steps follow each other, as if each were a token.
            k_BPC, v_BPC, beta_BPH = (
                x.unflatten(-1, (self.writes, -1)).flatten(1, 2) for x in (k, v, beta)
            )
            q_BHTD = unit_length(split_heads(q.to(wide), self.num_heads)) * self.key_size**-0.5
            k_BHPD = unit_length(split_heads(k_BPC.to(wide), self.num_heads))
            v_BHPV = split_heads(v_BPC.to(wide), self.states)
            if self.states > self.num_heads:  # value heads that share queries and keys
                q_BHTD, k_BHPD = (
                    x.repeat_interleave(self.states // self.num_heads, 1) for x in (q_BHTD, k_BHPD)
                )
            inputs = q_BHTD, k_BHPD, v_BHPV, g_BTH.mT, beta_BPH.mT
            y_BHTV = self.recur(*inputs, cache, positions, gate.dtype)
            y_BTHV = wide_rms_norm(y_BHTV.transpose(1, 2), self.gain_V, self.norm_eps)
        return self.out_proj(y_BTHV.flatten(2).to(gate.dtype) * F.silu(gate))
