"""One layer of the model: norm and attention, norm and MLP, each added to the stream."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from gptattn.attention.base import Attention, Shared
from gptattn.attention.cache import Cache
from gptattn.attention.linear import Linear


@dataclass(frozen=True)
class BlockStyle:
    """What surrounds the attention; GPT-2's by default.

    `bias`: of the MLP's layers. `zero_init`: what attentions and MLPs add starts at 0.
    """

    norm: str = "layer"
    norm_eps: float = 1e-5
    mlp: str = "gelu"
    bias: bool = True
    zero_init: bool = False


GPT2_STYLE = BlockStyle()


def new_norm(style: BlockStyle, d_model: int) -> nn.LayerNorm | nn.RMSNorm:
    """Return LayerNorm, or RMSNorm, which has no bias and does not subtract the mean.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467, sec. 3.
    """
    if style.norm == "rms":
        return nn.RMSNorm(d_model, style.norm_eps)
    return nn.LayerNorm(d_model, style.norm_eps)


class MLP(nn.Module):
    """Linear, tanh-GELU, Linear: x [..., d_model] -> [..., d_model]."""

    def __init__(self, d_model: int, d_mlp: int, bias: bool = True) -> None:
        super().__init__()
        self.up = Linear(d_model, d_mlp, bias=bias)
        self.down = Linear(d_mlp, d_model, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))

    def activation(self, x: Tensor) -> Tensor:
        """Return what the second layer reads."""
        return F.gelu(x, approximate="tanh")


class SquaredReLU(MLP):
    """Linear, squared ReLU, Linear: x [..., d_model] -> [..., d_model].

    Source: So et al. 2021 (Primer), arXiv:2109.08668, sec. 3.
    """

    def activation(self, x: Tensor) -> Tensor:
        return F.relu(x).square()


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)): x [..., d_model] -> [..., d_model].

    Source: Shazeer 2020, arXiv:2002.05202, sec. 2.
    """

    def __init__(self, d_model: int, d_mlp: int, bias: bool = False) -> None:
        super().__init__()
        self.gate = Linear(d_model, d_mlp, bias=bias)
        self.up = Linear(d_model, d_mlp, bias=bias)
        self.down = Linear(d_mlp, d_model, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


MLPS = {"gelu": MLP, "relu2": SquaredReLU, "swiglu": SwiGLU}


class Block(nn.Module):
    """Pre-norm block: x + attention(norm(x)), then x + MLP(norm(x)), if there is an MLP."""

    def __init__(
        self,
        attention: Attention,
        d_model: int,
        d_mlp: int,
        dropout: float,
        style: BlockStyle = GPT2_STYLE,
    ) -> None:
        super().__init__()
        self.norm_attention = new_norm(style, d_model)
        self.attention = attention
        self.norm_mlp, self.mlp = None, None
        if style.mlp != "none":
            self.norm_mlp = new_norm(style, d_model)
            self.mlp = MLPS[style.mlp](d_model, d_mlp, style.bias)
        self.dropout = nn.Dropout(dropout)

    @property
    def d_mlp(self) -> int:
        """The hidden width of the MLP; 0 without one."""
        return 0 if self.mlp is None else self.mlp.up.out_features

    def forward(self, x: Tensor, cache: Cache | None, shared: Shared) -> Tensor:
        x = x + self.dropout(self.attention(self.norm_attention(x), cache, shared))
        if self.mlp is None or self.norm_mlp is None:
            return x
        return x + self.dropout(self.mlp(self.norm_mlp(x)))
