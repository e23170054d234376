"""Multi-head attention: one projection per role, split into heads."""

from gptattn.attention.core import Backend
from gptattn.attention.split import SplitAttention
from gptattn.position.base import HeadPosition


class MultiHeadAttention(SplitAttention):
    """Every query head has keys and values of its own.

    x [B, T, d_in] -> y [B, T, d_out]. Raises ValueError where num_heads does not divide d_out.

    Source: Vaswani et al. 2017, arXiv:1706.03762, sec. 3.2.2.
    """

    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int,
        num_heads: int,
        dropout: float = 0.0,
        qkv_bias: bool = False,
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
            num_kv_heads=num_heads,
            out_proj=out_proj,
            out_bias=out_bias,
            scale=scale,
            window=window,
            backend=backend,
            position=position,
        )
