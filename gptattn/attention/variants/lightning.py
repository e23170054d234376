"""Lightning attention: linear attention with a fixed decay, slower in later heads and layers.

The recurrence, S = exp(g) S; S = S + k v^T; o = S^T q, is in `attention/recurrence.py`. Letters
besides the usual ones: V value size of a head (here D), C channels of all heads, H * D.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptattn.attention.base import Shared
from gptattn.attention.cache import Cache
from gptattn.attention.linear import Linear
from gptattn.attention.recurrence import (
    Backend,
    Chunk,
    Eps,
    RecurrentAttention,
    scale_size,
)
from gptattn.attention.softmax import split_heads, wide_rms_norm


class LightningAttention(RecurrentAttention):
    """A state of constant size per head, which decays at a fixed rate.

    x [B, T, d_in] -> y [B, T, d_out]. Queries, keys and values go through SiLU. Head h of H,
    counted from 1, has g = -2^(-8 h / H) (1 - layer / (num_layers - 1)), `layer` counted from 0; as
    in the release, 1e-5 added in two places keeps the last layer's rate above zero. The outputs of
    all heads together go through an RMSNorm, a gate sigmoid(x W_gate) and the output projection.

    Heads have `expand` times d_out / num_heads channels: with 1, 5 d^2 weights and d small ones.
    It needs no position and has no dropout. Raises ValueError for impossible sizes.

    Source: MiniMax 2025, arXiv:2501.08313, sec. 2.2; in chunks: Qin et al. 2024, arXiv:2401.04658,
    sec. 3; decay, norm and gate as in MiniMax-01's code.
    """

    layer: Tensor

    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int,
        num_heads: int,
        *,
        expand: float = 1.0,
        chunk: Chunk = 64,
        norm_eps: Eps = 1e-6,
        backend: Backend = "auto",
        out_bias: bool = True,
        layer: int = 0,
        num_layers: int = 1,
    ) -> None:
        super().__init__(d_in, d_out, context_length, num_heads, chunk, norm_eps, backend)
        if not 0 <= layer < num_layers:
            raise ValueError(f"layer={layer} must be 0 to {num_layers - 1} with {num_layers=}")
        D = self.head_dim = scale_size("expand", expand, d_out // num_heads)
        self.state_sizes = num_heads, D, D  # the cache holds this state S [H, D, V] per row
        C = num_heads * D
        self.W_query, self.W_key = (Linear(d_in, C, bias=False) for _ in range(2))
        self.W_value, self.W_gate = (Linear(d_in, C, bias=False) for _ in range(2))
        self.gain_C = nn.Parameter(torch.ones(C))
        self.out_proj = Linear(C, d_out, bias=out_bias)
        self.num_layers = num_layers
        # A tensor, because a Python number that differs by layer forces a recompilation; an
        # integer, because `.bfloat16()` would round a float.
        self.register_buffer("layer", torch.tensor(layer), persistent=False)

    def log_decays(self, dtype: torch.dtype) -> Tensor:
        """Return g of each head [H]."""
        h_H = torch.arange(1, self.num_heads + 1, dtype=dtype, device=self.layer.device)
        depth = self.layer.to(dtype) / (self.num_layers - 1 + 1e-5)
        return -torch.exp2(h_H * (-8 / self.num_heads)) * (1 - depth + 1e-5)

    def forward(
        self, x_BTE: Tensor, cache: Cache | None = None, shared: Shared | None = None
    ) -> Tensor:
        positions = self.begin(x_BTE, cache, shared).positions
        wide = torch.promote_types(x_BTE.dtype, torch.float32)
        q_BHTD, k_BHTD, v_BHTV = (
            split_heads(F.silu(W(x_BTE)).to(wide), self.num_heads)
            for W in (self.W_query, self.W_key, self.W_value)
        )
        gate = self.W_gate(x_BTE).sigmoid()
        with torch.autocast(x_BTE.device.type, enabled=False):
            g = self.log_decays(wide)[None, :, None].expand(1, -1, x_BTE.shape[1])
            inputs = q_BHTD, k_BHTD, v_BHTV, g, None
            y_BHTV = self.recur(*inputs, cache, positions, gate.dtype)
            y_BTC = wide_rms_norm(y_BHTV.transpose(1, 2).flatten(2), self.gain_C, self.norm_eps)
        return self.out_proj(y_BTC.to(gate.dtype) * gate)
