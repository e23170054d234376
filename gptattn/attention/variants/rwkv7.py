"""RWKV-7 (Goose): a state that decays by channel, and removes with separate keys.

The recurrence, S = diag(exp(g)) S + c (S^T a)^T + k v^T; o = S^T q, is in
`attention/recurrence.py`. The paper calls q the receptance r; here a = -kappa and c = kappa * rate,
where kappa has length 1 and the rate is the paper's a. Letters besides the usual ones: V value size
of a head (here D), C channels of all heads, H * D, X projections.
"""

import math
from collections.abc import Callable, Collection
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptattn.attention.base import Shared, rank_of
from gptattn.attention.cache import Cache
from gptattn.attention.linear import Linear
from gptattn.attention.recurrence import Chunk, Eps, RecurrentAttention
from gptattn.attention.softmax import split_heads
from gptattn.position.base import Documents, Positions

VALUES = "rwkv7_values"  # the name in `Shared.state`, for the first RWKV-7 layer
# How the previous token's share falls from the first channel to the last: for queries, decays,
# keys, values, rates and gates.
POWERS = (0.2, 0.9, 0.7, 0.7, 0.9, 0.2)


class RWKV7(RecurrentAttention):
    """A state of constant size per head, with a decay and a rate of removal for each channel.

    x [B, T, d_in] -> y [B, T, d_out]. Each of six projections reads its own mix of a token and the
    one before, x + mix * (x_before - x). Three give queries, keys k and values. The others are
    low-rank adapters: they give each channel its decay, g = -exp(-0.5) sigmoid(.), the rate
    sigmoid(.) at which the state removes what it holds for kappa, and the gate. kappa is
    k * removal_gain, scaled to length 1 in each head; values are written at
    k * (1 + (rate - 1) * write_gain). In later layers, a fourth adapter sets the first layer's
    share in each value, unless `value_residual` is False. The heads' outputs go through a
    LayerNorm; v times sum(q * k * bonus) is added; then come the gate and the output projection.

    A rank below 1 is a share of d_out. The defaults give the authors' 64, 64, 32 and 128 at
    d = 768: 4 d^2 + 2 d (64 + 64 + 128) weights and 13 d small ones, in later layers 65 d more. It
    needs no position and, as in the paper, has no dropout. Raises ValueError for impossible sizes
    and ranks.

    Source: Peng et al. 2025, arXiv:2503.14456, sec. 4; initial values as in the authors' code,
    github.com/BlinkDL/RWKV-LM, except for the projections, which start as in the other attentions;
    the adapters' second matrices are orthogonal there, and drawn here with the same size.
    """

    delta: ClassVar[bool] = True
    by_channel: ClassVar[bool] = True
    removes: ClassVar[bool] = True
    shares_freely: ClassVar[bool] = True

    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int,
        num_heads: int,
        *,
        decay_rank: float = 0.0833,
        removal_rank: float = 0.0833,
        value_rank: float = 0.0417,
        gate_rank: float = 0.1667,
        value_residual: bool = True,
        chunk: Chunk = 32,
        norm_eps: Eps = 6.4e-4,
        backend: Literal["auto", "chunked"] = "auto",
        out_bias: bool = True,
        layer: int = 0,
        num_layers: int = 1,
        provided: Collection[str] = (),
    ) -> None:
        super().__init__(d_in, d_out, context_length, num_heads, chunk, norm_eps, backend)
        D, C = d_out // num_heads, d_out
        self.head_dim, self.state_sizes = D, (num_heads, D, D)  # S [H, D, V]
        self.mixes = value_residual and VALUES in provided
        self.shares = value_residual and not self.mixes

        def adapter(name: str, rank: float, bias_C: Tensor | None = None) -> "Adapter":
            return Adapter(d_in, C, rank_of(name, rank, C, min(d_in, C)), bias_C)

        ramp_C = torch.linspace(0, 1, C)
        wave_C = torch.linspace(-1, 1, D).repeat(num_heads)
        wave_C = wave_C * wave_C.abs()
        curve = 1 + (layer / max(num_layers - 1, 1)) ** 0.3
        power_X111 = (1 - layer / num_layers) * torch.tensor(POWERS)[:, None, None, None]
        self.mix_X11E = nn.Parameter(1 - (torch.arange(d_in) / d_in) ** power_X111)
        self.W_query, self.W_key, self.W_value = (Linear(d_in, C, bias=False) for _ in range(3))
        decay_C = 6 * ramp_C**curve - 5.5 + 2.5 * wave_C
        self.decay = adapter("decay_rank", decay_rank, decay_C)
        rate_C = 0.4 * ramp_C - 0.39 + 0.3 * wave_C
        self.removal = adapter("removal_rank", removal_rank, rate_C)
        share_C = 0.93 - 0.4 * ramp_C
        rank_of("value_rank", value_rank, C, min(d_in, C))  # checked even if unused
        self.residual = adapter("value_rank", value_rank, share_C) if self.mixes else None
        self.gate = adapter("gate_rank", gate_rank)
        self.removal_gain_C = nn.Parameter(0.76 - 0.1 * ramp_C)
        self.write_gain_C = nn.Parameter(torch.full((C,), 1.02))
        self.bonus_C = nn.Parameter(torch.full((C,), -0.04))
        self.gain_C = nn.Parameter(torch.full((C,), ((layer + 1) / num_layers) ** 0.7))
        self.bias_C = nn.Parameter(torch.zeros(C))
        self.out_proj = Linear(C, d_out, bias=out_bias)

    def forward(
        self, x_BTE: Tensor, cache: Cache | None = None, shared: Shared | None = None
    ) -> Tensor:
        shared = self.begin(x_BTE, cache, shared)
        x_XBTE = self.mix_tokens(x_BTE, cache, shared.positions)
        for_query, for_decay, for_key, for_value, for_removal, for_gate = x_XBTE.unbind(0)
        q, k, v = self.W_query(for_query), self.W_key(for_key), self.W_value(for_value)
        if self.residual is not None:
            if VALUES not in shared.state:
                raise ValueError(f"{VALUES} are missing; run this after the first RWKV-7 layer")
            v = v + self.residual(for_value).sigmoid() * (shared.state[VALUES] - v)
        elif self.shares:
            shared.state[VALUES] = v
        decay, rate = self.decay(for_decay, torch.tanh), self.removal(for_removal)
        gate = self.gate(for_gate, torch.sigmoid)
        wide = torch.promote_types(x_BTE.dtype, torch.float32)
        with torch.autocast(x_BTE.device.type, enabled=False):
            q, k, v, decay, rate = (x.to(wide) for x in (q, k, v, decay, rate))
            rate = rate.sigmoid()
            kappa = k * self.removal_gain_C
            k = k * (1 + (rate - 1) * self.write_gain_C)
            of_heads = q, k, v, -math.exp(-0.5) * decay.sigmoid(), kappa, rate
            q_BHTD, k_BHTD, v_BHTV, g_BHTD, kappa_BHTD, rate_BHTD = (
                split_heads(x, self.num_heads) for x in of_heads
            )
            kappa_BHTD = F.normalize(kappa_BHTD, dim=-1)
            inputs = q_BHTD, k_BHTD, v_BHTV, g_BHTD, None
            removal = -kappa_BHTD, kappa_BHTD * rate_BHTD
            y_BHTV = self.recur(*inputs, cache, shared.positions, gate.dtype, removal)
            y_BTHV = F.layer_norm(y_BHTV.transpose(1, 2), y_BHTV.shape[3:], eps=self.norm_eps)
            y_BTC = y_BTHV.flatten(2) * self.gain_C + self.bias_C
            bonus_BTH1 = (q * k * self.bonus_C).unflatten(2, (self.num_heads, -1)).sum(3, True)
            y_BTC = y_BTC + (bonus_BTH1 * v_BHTV.transpose(1, 2)).flatten(2)
        return self.out_proj(y_BTC.to(gate.dtype) * gate)

    def mix_tokens(self, x_BTE: Tensor, cache: Cache | None, positions: Positions) -> Tensor:
        """Return each projection's mix of every token and the one before it [X, B, T, E].

        Padding counts as 0, and so does the token before the first of a row or document.
        """
        if isinstance(positions, Tensor):
            x_BTE = x_BTE * (positions >= 0).unsqueeze(-1)
        if cache is None:
            before = F.pad(x_BTE[:, :-1], (0, 0, 1, 0))
        else:
            before = torch.cat([cache.tensors["last"].to(x_BTE.dtype), x_BTE[:, :-1]], 1)
            cache.tensors["last"].copy_(x_BTE[:, -1:])
        if isinstance(positions, Documents):
            before = before.masked_fill((positions.position_BT == 0).unsqueeze(-1), 0.0)
        return x_BTE + self.mix_X11E.to(x_BTE.dtype) * (before - x_BTE)

    def provides(self) -> dict[str, str]:
        return {VALUES: f"d_out={self.d_out}"} if self.shares else {}

    def needs(self) -> dict[str, str]:
        return {VALUES: f"d_out={self.d_out}"} if self.mixes else {}

    def new_cache(self, batch: int, capacity: int) -> Cache:
        """Return an empty cache: the state, in float32 or wider, and the last token."""
        cache = super().new_cache(batch, capacity)
        cache.tensors["last"] = self.mix_X11E.new_zeros(batch, 1, self.d_in)
        return cache

    def initialise(self, std: float) -> None:
        super().initialise(std)
        for module in self.modules():
            if isinstance(module, Adapter):
                module.down.weight.zero_()
                module.up.weight.normal_(0.0, 0.1 * self.d_out**-0.5)


class Adapter(nn.Module):
    """A low-rank map, W_up act(W_down x), plus a bias [C] if you give its initial values."""

    def __init__(self, d_in: int, d_out: int, rank: int, bias_C: Tensor | None) -> None:
        super().__init__()
        self.down, self.up = Linear(d_in, rank, bias=False), Linear(rank, d_out, bias=False)
        self.bias_C = None if bias_C is None else nn.Parameter(bias_C)

    def forward(self, x_BTE: Tensor, act: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        low = self.down(x_BTE)
        y_BTC = self.up(low if act is None else act(low))
        return y_BTC if self.bias_C is None else y_BTC + self.bias_C
