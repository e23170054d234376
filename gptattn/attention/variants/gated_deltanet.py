"""Gated DeltaNet: linear attention that corrects what its state holds for a key, and forgets.

The gated delta rule keeps a state S [D, V] per head, which every token decays, corrects and reads:

    S = exp(g) S;    S = S + beta k (v - k^T S)^T;    o = S^T q

`step` is this definition for one token; `chunked` does the same for all tokens of a row, in
training. In rows of several documents each begins with a state of zero: `start_BT` is where in its
row each token's document begins. Letters beside the usual ones: V value size of a head, N chunks, C
tokens of a chunk; in the convolution C channels, K its size.
"""

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptattn.attention.base import Attention, Shared, check_sizes
from gptattn.attention.cache import Cache
from gptattn.attention.linear import Linear
from gptattn.attention.softmax import split_heads, wide_rms_norm
from gptattn.position.base import Documents

NORM_EPS = 1e-6  # of the length of queries and keys
STEPS = (1e-3, 1e-1)  # between which softplus(decay_bias) starts


class GatedDeltaNet(Attention):
    """A state of constant size per head, written by the gated delta rule.

    x [B, T, d_in] -> y [B, T, d_out]. Queries, keys and values each pass a causal depthwise
    convolution and SiLU; queries and keys then have length 1. Per token and head
    g = -exp(a_log) softplus(x w_a + decay_bias) and beta = sigmoid(x w_b). The heads' outputs pass
    an RMSNorm, a gate silu(x W_gate) and the output projection.

    Queries and keys have `expand_k` times d_out channels, values and gate `expand_v` times. With
    1 and 1, heads are as large as in the model's other attentions: 5 d^2 + 2 d H weights, and
    3 d conv_size + 2 H + D small ones. The authors' code has 0.75 and 1.5, thus 6 d^2. Queries and
    keys of a head serve `value_heads` heads of values, each with a state; 2 in Qwen3-Next. It needs
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
        value_heads: int = 1,
        chunk: int = 64,
        norm_eps: float = 1e-5,
        out_bias: bool = True,
    ) -> None:
        super().__init__()
        check_sizes(d_out, num_heads, num_heads, 0.0)
        if value_heads < 1:
            raise ValueError(f"value_heads={value_heads} must be 1 or more for each key head")
        conv_size = conv_size or 0
        if conv_size < 0:
            raise ValueError(
                f"conv_size={conv_size} is negative; give the tokens that a convolution sees, "
                "or null for none"
            )
        if conv_size > context_length:
            raise ValueError(f"conv_size={conv_size} is above {context_length=}; 4 is usual")
        if chunk < 1:
            raise ValueError(f"chunk={chunk} must be 1 or more tokens; 64 is usual")
        if not 0.0 < norm_eps < math.inf:
            raise ValueError(f"norm_eps={norm_eps} must be a positive number; 1e-5 is usual")
        self.d_in, self.d_out, self.context_length = d_in, d_out, context_length
        self.num_heads, self.chunk, self.norm_eps = num_heads, chunk, norm_eps
        self.key_size = _size("expand_k", expand_k, d_out // num_heads)
        self.value_size = _size("expand_v", expand_v, d_out // num_heads)
        states = self.states = num_heads * value_heads
        keys, values = num_heads * self.key_size, states * self.value_size
        self.channels = (keys, keys, values)
        self.W_query, self.W_key = (Linear(d_in, keys, bias=False) for _ in range(2))
        self.W_value, self.W_gate = (Linear(d_in, values, bias=False) for _ in range(2))
        self.W_decay, self.W_beta = (Linear(d_in, states, bias=False) for _ in range(2))
        self.conv = ShortConvolution(sum(self.channels), conv_size) if conv_size else None
        # exp(a_log) from 0 to 16; at 0 itself the logarithm would be infinite.
        self.a_log_H = nn.Parameter(torch.empty(states).uniform_(0.01, 16).log())
        low, high = map(math.log, STEPS)
        step_H = torch.empty(states).uniform_(low, high).exp()
        self.decay_bias_H = nn.Parameter(step_H.expm1().log())  # softplus of it is step_H
        self.gain_V = nn.Parameter(torch.ones(self.value_size))
        self.out_proj = Linear(values, d_out, bias=out_bias)

    def forward(
        self, x_BTE: Tensor, cache: Cache | None = None, shared: Shared | None = None
    ) -> Tensor:
        positions = self.begin(x_BTE, cache, shared).positions
        new_BTC = torch.cat([self.W_query(x_BTE), self.W_key(x_BTE), self.W_value(x_BTE)], -1)
        gate, decay, beta = self.W_gate(x_BTE), self.W_decay(x_BTE), self.W_beta(x_BTE)
        start_BT = positions.start_BT if isinstance(positions, Documents) else None
        there = (positions >= 0).unsqueeze(-1) if isinstance(positions, Tensor) else None
        if there is not None:
            new_BTC = new_BTC * there
        s_BHDV = None if cache is None else cache.tensors["state"]
        if self.conv is not None:
            new_BTC = self.conv(new_BTC, None if cache is None else cache.tensors["tail"], start_BT)
        q, k, v = F.silu(new_BTC).split(self.channels, -1)
        wide = torch.promote_types(x_BTE.dtype, torch.float32)
        # A state that sums thousands of small steps needs more digits than 16 bits have.
        with torch.autocast(x_BTE.device.type, enabled=False):
            rate_BTH = F.softplus(decay.to(wide) + self.decay_bias_H.to(wide))
            g_BHT = (-self.a_log_H.to(wide).exp() * rate_BTH).mT
            beta_BHT = beta.to(wide).sigmoid().mT
            if there is not None:  # a missing token neither decays nor changes the state
                g_BHT, beta_BHT = g_BHT * there.mT, beta_BHT * there.mT
            q_BHTD = _unit(split_heads(q.to(wide), self.num_heads)) * self.key_size**-0.5
            k_BHTD = _unit(split_heads(k.to(wide), self.num_heads))
            v_BHTV = split_heads(v.to(wide), self.states)
            if self.states > self.num_heads:  # value heads that share queries and keys
                q_BHTD, k_BHTD = (
                    x.repeat_interleave(self.states // self.num_heads, 1) for x in (q_BHTD, k_BHTD)
                )
            inputs = q_BHTD, k_BHTD, v_BHTV, g_BHT, beta_BHT
            if s_BHDV is not None and x_BTE.shape[1] == 1:
                y_BHV, after = step(*(x.squeeze(2) for x in inputs), s_BHDV=s_BHDV)
                y_BHTV = y_BHV.unsqueeze(2)
            else:
                y_BHTV, after = chunked(*inputs, s_BHDV, self.chunk, start_BT)
            if s_BHDV is not None:
                s_BHDV.copy_(after)
            y_BTHV = wide_rms_norm(y_BHTV.transpose(1, 2), self.gain_V, self.norm_eps)
        return self.out_proj(y_BTHV.flatten(2).to(gate.dtype) * F.silu(gate))

    def new_cache(self, batch: int, capacity: int) -> Cache:
        w = self.W_query.weight
        wide, H = torch.promote_types(w.dtype, torch.float32), self.states
        tensors = {"state": w.new_zeros(batch, H, self.key_size, self.value_size, dtype=wide)}
        if self.conv is not None:  # the inputs that its next outputs need
            tensors["tail"] = w.new_zeros(batch, self.conv.size - 1, sum(self.channels))
        return Cache(tensors)

    def flops(self, T: int, S: int) -> int:
        D, V = self.key_size, self.value_size
        if T == 1 < S:
            # `step`: a state decays in D V, and k^T S, the correction and q^T S take 2 D V.
            return 7 * self.states * D * V
        N = -(-T // self.chunk)  # `chunked`: its products and its solve
        C = -(-T // N)
        width = V + D  # columns of u
        scores = 2 * 2 * C * C * D  # k k^T and q k^T
        solve = C * (C - 1) * width
        within = 2 * C * C * width + 2 * C * D * width  # what u gives to outputs and to the state
        carried = 2 * D * D * V + 2 * C * D * V
        return self.states * N * (scores + solve + within + carried)


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


def step(
    q_BHD: Tensor, k_BHD: Tensor, v_BHV: Tensor, g_BH: Tensor, beta_BH: Tensor, s_BHDV: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the output [B, H, V] of one token, and the state after it.

    Source: Yang et al. 2024, arXiv:2412.06464, eq. 10.
    """
    s_BHDV = g_BH.exp()[..., None, None] * s_BHDV
    error_BHV = v_BHV - (k_BHD[..., None, :] @ s_BHDV).squeeze(-2)
    write_BHV = beta_BH[..., None] * error_BHV
    s_BHDV = s_BHDV + k_BHD[..., None] * write_BHV[..., None, :]
    return (q_BHD[..., None, :] @ s_BHDV).squeeze(-2), s_BHDV


def chunked(
    q_BHTD: Tensor,
    k_BHTD: Tensor,
    v_BHTV: Tensor,
    g_BHT: Tensor,
    beta_BHT: Tensor,
    s_BHDV: Tensor | None,
    chunk: int,
    start_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the outputs [B, H, T, V] and the last state, by products over at most `chunk` tokens.

    Without a state it starts at zero. Within a chunk the steps u solve a triangular system, because
    each depends on the ones before it: (1 + A) u = beta (v - exp(b) S^T k), where b are the sums of
    g since the chunk's start and A = beta k k^T exp(b_i - b_j) below the diagonal. No exponent is
    above zero, so nothing overflows, however strong the decay.

    Source: Yang et al. 2024, arXiv:2412.06464, sec. 3.3; the system: Yang et al. 2024,
    arXiv:2406.06484, sec. 3.2.
    """
    T, V = v_BHTV.shape[2:]
    N = -(-T // chunk)
    C = -(-T // N)  # equal chunks need the least padding
    filled = (F.pad(x, (0, 0, 0, N * C - T)) for x in (q_BHTD, k_BHTD, v_BHTV))
    q, k, v = (x.unflatten(2, (N, C)) for x in filled)
    g, beta = (F.pad(x, (0, N * C - T)).unflatten(2, (N, C)) for x in (g_BHT, beta_BHT))

    # In float64: a small difference of two large sums, as after a strong decay, loses digits.
    b = g.double().cumsum(-1)
    later = torch.ones(C, C, dtype=torch.bool, device=q.device).triu(1)
    # Masked before exp: the exponents above the diagonal are positive and may overflow.
    exponent = (b[..., :, None] - b[..., None, :]).to(q.dtype).masked_fill(later, -torch.inf)
    decay, since_start = exponent.exp(), b.to(q.dtype).exp()[..., None]
    to_last = (b[..., -1:] - b).to(q.dtype).exp()[..., None]
    if start_BT is not None:  # nothing passes from one document to the next
        # The padding of the last chunk belongs to the last document.
        filled_BT = torch.cat([start_BT, start_BT[:, -1:].expand(-1, N * C - T)], 1)
        start_B1NC = filled_BT.unflatten(1, (N, C))[:, None]
        first_N1 = C * torch.arange(N, device=start_BT.device)[:, None]  # token of each chunk
        same_document = start_B1NC[..., :, None] == start_B1NC[..., None, :]
        decay = decay * same_document
        since_start = since_start * (start_B1NC < first_N1)[..., None]
        to_last = to_last * same_document[..., -1:]
    a = beta[..., None] * decay * (k @ k.mT)
    weight = decay * (q @ k.mT)
    to_end = to_last * k
    # u = u_v - u_k S for a state S that is not known yet; this holds for everything linear in u, so
    # only the states are left to the loop.
    right = beta[..., None] * torch.cat([v, since_start * k], -1)
    u = torch.linalg.solve_triangular(a, right, upper=False, unitriangular=True)  # ignores a's rest
    o_v, o_k = (weight @ u).split([V, q.shape[-1]], -1)
    gain_v, gain_k = (to_end.mT @ u).split([V, q.shape[-1]], -1)
    keep = since_start[..., -1:, :] * torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)
    s_BHDV = torch.zeros_like(gain_v[:, :, 0]) if s_BHDV is None else s_BHDV
    before, s = [], s_BHDV.flatten(0, 1)  # the state before each chunk
    for keep_chunk, gain_chunk in zip(
        (keep - gain_k).flatten(0, 1).unbind(1), gain_v.flatten(0, 1).unbind(1), strict=True
    ):
        before.append(s)
        s = torch.baddbmm(gain_chunk, keep_chunk, s)
    s_BHNDV = torch.stack(before, 1).unflatten(0, s_BHDV.shape[:2])
    o = o_v + (since_start * q - o_k) @ s_BHNDV
    return o.flatten(2, 3)[:, :, :T], s.view_as(s_BHDV)


class ShortConvolution(nn.Module):
    """y[t] = sum over i of weight[i] x[t - size + 1 + i], per channel, without bias.

    Letters: C channels, K = size. The weights are drawn as torch draws those of a depthwise Conv1d.
    """

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        self.size, bound = size, size**-0.5
        # With torch's axis of 1, so it is not a matrix.
        self.weight_C1K = nn.Parameter(torch.empty(channels, 1, size).uniform_(-bound, bound))

    def forward(
        self, x_BTC: Tensor, tail_BKC: Tensor | None = None, start_BT: Tensor | None = None
    ) -> Tensor:
        """Return y [B, T, C]. The tail holds the size - 1 inputs before x and is advanced by T.

        start_BT: where in its row each token's document begins; it sees no inputs before that.
        """
        T = x_BTC.shape[1]
        if tail_BKC is None:
            seen = F.pad(x_BTC, (0, 0, self.size - 1, 0))
        else:
            seen = torch.cat([tail_BKC.to(x_BTC.dtype), x_BTC], 1)
            tail_BKC.copy_(seen[:, T:])
        y_BTC = torch.zeros_like(x_BTC)
        for i, w_C in enumerate(self.weight_C1K[:, 0].unbind(-1)):
            tap_BTC = w_C * seen[:, i : i + T]
            if start_BT is not None:
                place_T = torch.arange(T, device=x_BTC.device) - (self.size - 1 - i)
                tap_BTC = tap_BTC.masked_fill((place_T < start_BT).unsqueeze(-1), 0.0)
            y_BTC = y_BTC + tap_BTC
        return y_BTC
