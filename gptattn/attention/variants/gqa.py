"""Grouped-query attention; with one key/value head it is multi-query attention."""

from typing import Unpack

from torch import Tensor

from gptattn.attention.base import HasHeads
from gptattn.attention.linear import Linear
from gptattn.attention.softmax import HeadDim, Heads, SoftmaxAttention, SoftmaxOptions, split_heads


class GroupedQueryAttention(HasHeads, SoftmaxAttention):
    """Groups of R = num_heads / num_kv_heads query heads share one head of keys and values.

    x [B, T, d_in] -> y [B, T, d_out]. The cache holds num_kv_heads heads. `head_dim` None: d_out /
    num_heads. Raises ValueError if that is not a whole number, or num_kv_heads does not
    divide num_heads.

    Source: Ainslie et al. 2023, arXiv:2305.13245, sec. 2.2; num_kv_heads=1: Shazeer 2019,
    arXiv:1911.02150, sec. 3.
    """

    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int,
        num_heads: int,
        num_kv_heads: int = 2,
        *,
        qkv_bias: bool = False,
        out_proj: bool = True,
        out_bias: bool = True,
        head_dim: HeadDim = None,
        **options: Unpack[SoftmaxOptions],
    ) -> None:
        sizes = d_in, d_out, context_length, num_heads, num_kv_heads
        super().__init__(*sizes, head_dim=head_dim, **options)
        # In mha's order, so that a seed gives mha's numbers if num_kv_heads=num_heads.
        self.W_query = Linear(d_in, num_heads * self.head_dim, bias=qkv_bias)
        self.W_key = Linear(d_in, num_kv_heads * self.head_dim, bias=qkv_bias)
        self.W_value = Linear(d_in, num_kv_heads * self.head_dim, bias=qkv_bias)
        self.out_proj = self.project_out(out_proj, out_bias)

    def project(self, x_BTE: Tensor) -> Heads:
        q_BHTD = split_heads(self.W_query(x_BTE), self.num_heads)
        # Fewer heads: in `core.attend` query head h reads key/value head h // R.
        k_BGTD = split_heads(self.W_key(x_BTE), self.num_kv_heads)
        v_BGTD = split_heads(self.W_value(x_BTE), self.num_kv_heads)
        return q_BHTD, k_BGTD, v_BGTD
