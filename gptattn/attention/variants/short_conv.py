"""The gated short convolution: a token reads the last few tokens, and nothing before them."""

from typing import Annotated, ClassVar

from msgspec import Meta
from torch import Tensor

from gptattn.attention.base import Attention, Shared
from gptattn.attention.cache import Cache
from gptattn.attention.convolution import ShortConvolution
from gptattn.attention.linear import Linear


class GatedShortConvolution(Attention):
    """y = W_out (c * conv(b * v)): a depthwise convolution between gates; b, c, v are linear in x.

    x [B, T, d_in] -> y [B, T, d_out]. The gates b and c and the values v have d_out numbers each,
    from projections without bias or activation. The causal convolution over the last `conv_size`
    tokens has no bias either: 4 d^2 weights and conv_size * d small ones. It has no heads and no
    dropout, and needs no position. The cache is the convolution's last conv_size - 1 inputs.

    Source: LFM2, Liquid AI 2025, arXiv:2511.23404; the convolution starts as in torch.
    """

    knows_order: ClassVar[bool] = True
    keeps_documents: ClassVar[bool] = True

    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int,
        *,
        conv_size: Annotated[int, Meta(ge=2)] = 3,
        out_bias: bool = True,
    ) -> None:
        super().__init__()
        if conv_size > context_length:
            raise ValueError(f"conv_size={conv_size} is above {context_length=}; 3 is usual")
        self.d_in, self.d_out, self.context_length = d_in, d_out, context_length
        self.W_write, self.W_read, self.W_value = (
            Linear(d_in, d_out, bias=False) for _ in range(3)
        )
        self.conv = ShortConvolution(d_out, conv_size)
        self.out_proj = Linear(d_out, d_out, bias=out_bias)

    def forward(
        self, x_BTE: Tensor, cache: Cache | None = None, shared: Shared | None = None
    ) -> Tensor:
        positions = self.begin(x_BTE, cache, shared).positions
        written_BTE = self.W_write(x_BTE) * self.W_value(x_BTE)
        return self.out_proj(self.W_read(x_BTE) * self.conv(written_BTE, cache, positions))

    def new_cache(self, batch: int, capacity: int) -> Cache:
        tail = self.conv.weight_C1K.new_zeros(batch, self.conv.size - 1, self.d_out)
        return Cache({"tail": tail})

    def flops(self, T: int, S: int) -> int:
        return 2 * (self.conv.size + 1) * self.d_out * T  # the convolution, and both gates
