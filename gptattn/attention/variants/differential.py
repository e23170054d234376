"""Differential attention: the difference of two softmaxes, which cancels what they share."""

import math
from collections.abc import Mapping
from typing import Unpack

import torch
from torch import Tensor, nn

from gptattn.attention.base import Shared, divisors
from gptattn.attention.cache import Entry
from gptattn.attention.core import is_gpu
from gptattn.attention.linear import Linear
from gptattn.attention.softmax import (
    Heads,
    PlacedRule,
    SoftmaxAttention,
    SoftmaxOptions,
    split_heads,
    wide_rms_norm,
)

EPS = 1e-5  # of the RMSNorm, as in the authors' code


class DifferentialAttention(SoftmaxAttention):
    """Query heads j and j + H/2 are pair j: its output is (A1 - lambda * A2) V.

    x [B, T, d_in] -> y [B, T, d_out]. It has half as many heads as other variants, each with two
    softmaxes A1 and A2 and values of size 2 D. Parameters and cache match `mha`, except for 6 * D
    numbers. Each pair's output has an RMSNorm, times 1 - lambda0. With groups, key heads are
    paired like query heads. Dropout acts on A1 and A2.

    lambda = exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2) + lambda0, the same for all
    pairs of a layer; lambda0 = 0.8 - 0.6 * exp(-0.3 * layer), `layer` counted from 0.

    `attention_weights` returns the H softmaxes, A1 of all pairs first; each row sums to 1. Raises
    ValueError for impossible sizes, such as an odd number of heads.

    Source: Ye et al. 2024, arXiv:2410.05258, sec. 2.1.
    """

    lambda0: Tensor

    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        layer: int = 0,
        qkv_bias: bool = False,
        out_proj: bool = True,
        out_bias: bool = True,
        **options: Unpack[SoftmaxOptions],
    ) -> None:
        heads = num_heads if num_kv_heads is None else num_kv_heads
        for name, count, whole in (
            ("num_heads", num_heads, d_out),
            ("num_kv_heads", heads, num_heads),
        ):
            if count % 2:
                raise ValueError(
                    f"{name}={count} must be even for differential attention, which pairs them; "
                    f"use one of {[n for n in divisors(whole) if n % 2 == 0]}"
                )
        super().__init__(d_in, d_out, context_length, num_heads, heads, **options)
        self.W_query = Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = Linear(d_in, heads * self.head_dim, bias=qkv_bias)
        self.W_value = Linear(d_in, heads * self.head_dim, bias=qkv_bias)
        self.out_proj = Linear(d_out, d_out, bias=out_bias) if out_proj else None
        # A tensor, because a Python number that differs by layer forces a recompilation.
        lambda0 = torch.tensor(0.8 - 0.6 * math.exp(-0.3 * layer), dtype=torch.float64)
        self.register_buffer("lambda0", lambda0, persistent=False)
        self.lambda_q1_D = nn.Parameter(0.1 * torch.randn(self.head_dim))
        self.lambda_k1_D = nn.Parameter(0.1 * torch.randn(self.head_dim))
        self.lambda_q2_D = nn.Parameter(0.1 * torch.randn(self.head_dim))
        self.lambda_k2_D = nn.Parameter(0.1 * torch.randn(self.head_dim))
        self.norm_gain = nn.Parameter(torch.ones(2 * self.head_dim))

    def initialise(self, std: float) -> None:
        super().initialise(std)
        for vector in (self.lambda_q1_D, self.lambda_k1_D, self.lambda_q2_D, self.lambda_k2_D):
            vector.normal_(0.0, 0.1)

    def project(self, x_BTE: Tensor) -> Heads:
        q_BHTD = split_heads(self.W_query(x_BTE), self.num_heads)
        k_BGTD = split_heads(self.W_key(x_BTE), self.num_kv_heads)
        v_BGTD = split_heads(self.W_value(x_BTE), self.num_kv_heads)
        return q_BHTD, k_BGTD, v_BGTD

    def entries(self, x_BTE: Tensor, shared: Shared) -> tuple[Tensor, dict[str, Tensor]]:
        q_BHTD, k_BGTD, v_BGTD = self.encode(*self.project(x_BTE), shared)
        # A pair's values are neighbours in the projection's output, so this is a view.
        wide_BGTD = split_heads(v_BGTD.transpose(1, 2).flatten(2), self.num_kv_heads // 2)
        return q_BHTD, {"k": k_BGTD, "v": wide_BGTD}

    def cached(self) -> dict[str, Entry]:
        keys = Entry(self.num_kv_heads, self.head_dim)
        return {"k": keys, "v": Entry(self.num_kv_heads // 2, 2 * self.head_dim)}

    def attend(self, q_BHTD: Tensor, held: Mapping[str, Tensor], placed: PlacedRule) -> Tensor:
        # Values are summed once, by the difference. Fused attention returns no weights, so it would
        # sum them by A1 and by A2: on two cores, training at T = 1,024 then takes 2.0 times `mha`'s
        # time instead of 1.7, and decoding at S = 8,192 takes 1.9 times instead of 1.0.
        # On a GPU, one fused call costs less: forward and backward of 12 layers of GPT-2 small, of
        # 16 x 1,024 tokens: 1,559 kernels, 68 GB moved (two calls 1,607, 68; blocks 9,515, 278).
        k, v, drops = held["k"], held["v"], self.training and self.dropout > 0
        fuses = (self.backend == "flex" or not placed.rule.changes_scores) and not drops
        if fuses and is_gpu(q_BHTD) and q_BHTD.shape[2] == k.shape[2]:
            y = self._difference(self.mix(q_BHTD, k, torch.cat([v, v], dim=1), placed))
        else:
            y = self.mix(q_BHTD, k, v, placed, self._difference)
        y = wide_rms_norm(y, (1 - self.lambda0) * self.norm_gain, EPS)
        # A pair's output becomes two heads side by side, one from each half.
        return y.unflatten(3, (2, self.head_dim)).transpose(2, 3).flatten(1, 2)

    def _difference(self, w_BHTS: Tensor) -> Tensor:
        """Return A1 - lambda * A2 of each pair, [B, H/2, T, S]; or A1 V - lambda * A2 V."""
        plus = torch.exp((self.lambda_q1_D * self.lambda_k1_D).sum())
        minus = torch.exp((self.lambda_q2_D * self.lambda_k2_D).sum())
        lambda_ = plus - minus + self.lambda0
        first, second = w_BHTS.chunk(2, dim=1)
        return first - lambda_.to(w_BHTS.dtype) * second
