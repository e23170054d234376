"""One head: two forms without a mask, as in Raschka 2024, and the causal one for a GPT."""

from typing import Unpack

import torch
from torch import Tensor, nn

from gptattn.attention.base import HasHeads
from gptattn.attention.linear import Linear
from gptattn.attention.softmax import Heads, SoftmaxAttention, SoftmaxOptions


class SelfAttentionV1(nn.Module):
    """Self-attention with plain parameters, not causal: x [..., T, d_in] -> [..., T, d_out].

    Weights are [d_in, d_out] and multiply from the right; `nn.Linear`, as in V2, stores the
    transpose. Source: arXiv:1706.03762, sec. 3.2.1.
    """

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.W_query = nn.Parameter(torch.rand(d_in, d_out))
        self.W_key = nn.Parameter(torch.rand(d_in, d_out))
        self.W_value = nn.Parameter(torch.rand(d_in, d_out))

    def forward(self, x: Tensor) -> Tensor:
        return _self_attention(x @ self.W_query, x @ self.W_key, x @ self.W_value)


class SelfAttentionV2(nn.Module):
    """Self-attention with Linear layers, not causal: x [..., T, d_in] -> [..., T, d_out].

    Source: arXiv:1706.03762, sec. 3.2.1.
    """

    def __init__(self, d_in: int, d_out: int, qkv_bias: bool = False) -> None:
        super().__init__()
        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = nn.Linear(d_in, d_out, bias=qkv_bias)

    def forward(self, x: Tensor) -> Tensor:
        return _self_attention(self.W_query(x), self.W_key(x), self.W_value(x))


def _self_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5).softmax(dim=-1)
    return weights @ v


class CausalAttention(HasHeads, SoftmaxAttention):
    """One causal head: x [B, T, d_in] -> y [B, T, d_out], without an output projection.

    Source: arXiv:1706.03762, sec. 3.2.1 and 3.2.3.
    """

    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int,
        *,
        qkv_bias: bool = False,
        **options: Unpack[SoftmaxOptions],
    ) -> None:
        super().__init__(d_in, d_out, context_length, 1, 1, **options)
        self.W_query = Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = Linear(d_in, d_out, bias=qkv_bias)
        self.out_proj = None

    def project(self, x_BTE: Tensor) -> Heads:
        q_BTD, k_BTD, v_BTD = self.W_query(x_BTE), self.W_key(x_BTE), self.W_value(x_BTE)
        return q_BTD.unsqueeze(1), k_BTD.unsqueeze(1), v_BTD.unsqueeze(1)  # [B, 1, T, D]
