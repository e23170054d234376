"""Multi-head attention: every query head has keys and values of its own."""

from typing import Unpack

from gptattn.attention.softmax import Projected
from gptattn.attention.variants.gqa import GroupedQueryAttention


class MultiHeadAttention(GroupedQueryAttention):
    """Grouped-query attention in groups of one: H heads of queries, keys and values.

    x [B, T, d_in] -> y [B, T, d_out]. Raises ValueError where num_heads does not divide d_out.

    Source: Vaswani et al. 2017, arXiv:1706.03762, sec. 3.2.2.
    """

    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int,
        num_heads: int,
        **projected: Unpack[Projected],
    ) -> None:
        super().__init__(d_in, d_out, context_length, num_heads, num_heads, **projected)
