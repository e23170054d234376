"""Multi-head attention: every query head has its own keys and values."""

from typing import Unpack

from torch import Tensor

from gptattn.attention.base import HasHeads
from gptattn.attention.linear import Linear
from gptattn.attention.softmax import HeadDim, Heads, SoftmaxAttention, SoftmaxOptions, split_heads


class MultiHeadAttention(HasHeads, SoftmaxAttention):
    """One projection each for queries, keys and values, split into H heads.

    x [B, T, d_in] -> y [B, T, d_out]. `head_dim` None: d_out / num_heads. Raises ValueError if
    that is not a whole number.

    Source: Vaswani et al. 2017, arXiv:1706.03762, sec. 3.2.2.
    """

    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int,
        num_heads: int,
        *,
        qkv_bias: bool = False,
        out_proj: bool = True,
        out_bias: bool = True,
        head_dim: HeadDim = None,
        **options: Unpack[SoftmaxOptions],
    ) -> None:
        sizes = d_in, d_out, context_length, num_heads, num_heads
        super().__init__(*sizes, head_dim=head_dim, **options)
        # In this order, so that a seed gives the numbers in tests/attention/golden.json.
        width = num_heads * self.head_dim
        self.W_query = Linear(d_in, width, bias=qkv_bias)
        self.W_key = Linear(d_in, width, bias=qkv_bias)
        self.W_value = Linear(d_in, width, bias=qkv_bias)
        self.out_proj = self.project_out(out_proj, out_bias)

    def project(self, x_BTE: Tensor) -> Heads:
        q_BHTD = split_heads(self.W_query(x_BTE), self.num_heads)
        k_BHTD = split_heads(self.W_key(x_BTE), self.num_heads)
        v_BHTD = split_heads(self.W_value(x_BTE), self.num_heads)
        return q_BHTD, k_BHTD, v_BHTD
