"""Grouped-query attention; with one key/value head it is multi-query attention."""

from gptattn.attention.core import Backend
from gptattn.attention.split import SplitAttention
from gptattn.position.base import HeadPosition


class GroupedQueryAttention(SplitAttention):
    """Groups of num_heads / num_kv_heads query heads share one head of keys and values.

    x [B, T, d_in] -> y [B, T, d_out]. The cache holds num_kv_heads heads. Raises ValueError where
    num_heads does not divide d_out, or num_kv_heads does not divide num_heads.

    Source: Ainslie et al. 2023, arXiv:2305.13245, sec. 2.2; num_kv_heads=1: Shazeer 2019,
    arXiv:1911.02150, sec. 3.
    """

    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int,
        num_heads: int,
        dropout: float = 0.0,
        qkv_bias: bool = False,
        num_kv_heads: int = 1,
        out_proj: bool = True,
        out_bias: bool = True,
        scale: float | None = None,
        window: float | None = None,
        backend: Backend = "sdpa",
        position: HeadPosition | None = None,
    ) -> None:
        super().__init__(
            d_in=d_in,
            d_out=d_out,
            context_length=context_length,
            num_heads=num_heads,
            dropout=dropout,
            qkv_bias=qkv_bias,
            num_kv_heads=num_kv_heads,
            out_proj=out_proj,
            out_bias=out_bias,
            scale=scale,
            window=window,
            backend=backend,
            position=position,
        )
