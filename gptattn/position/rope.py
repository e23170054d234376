"""Rotary positions (RoPE): all or part of a head, stretched contexts (YaRN)."""

import math
from typing import Annotated, Literal

import torch
from msgspec import Meta
from torch import Tensor

from gptattn.position.base import HeadPosition, Positions, table_index

# YaRN: a pair that turns at least FAST times over the original context keeps its frequency; one
# that turns at most SLOW times is slowed down by the full stretch.
FAST, SLOW = 32, 1
Pairs = Literal["half", "neighbours"]


class RotaryPosition(HeadPosition):
    """Rotates the pair (x[i], x[i + R/2]) of a query or key at position p by p * base^(-2i/R).

    Half-split pairs are GPT-NeoX's. pairs=neighbours rotates (x[2i], x[2i + 1]), as the paper and
    GLM-4 do, which is the same up to a permutation of the weights.

    fraction: the share of a head that rotates. Its first R numbers rotate, where R is the largest
    even number in fraction * head_dim; the others pass unchanged, as in GPT-NeoX.
    stretch: the context's length over the trained one, which is `original_context` tokens, by
    default context_length / stretch. Frequencies and scores change as in YaRN; 1.0 changes nothing.

    Raises ValueError if R is 0, or if a head of odd size would rotate as a whole.

    Source: Su et al. 2021, arXiv:2104.09864, sec. 3.2; stretch: Peng et al. 2023,
    arXiv:2309.00071, sec. 3.2 to 3.4.
    """

    rotates = True
    cos_TR: Tensor
    sin_TR: Tensor

    def __init__(
        self,
        context_length: int,
        head_dim: int,
        base: Annotated[float, Meta(gt=0)] = 10_000.0,
        fraction: Annotated[float, Meta(gt=0, le=1)] = 1.0,
        stretch: Annotated[float, Meta(ge=1)] = 1.0,
        original_context: Annotated[int, Meta(ge=1)] | None = None,
        pairs: Pairs = "half",
    ) -> None:
        super().__init__()
        if fraction == 1 and head_dim % 2:
            raise ValueError(
                f"head_dim={head_dim} must be even for rotary positions; change the number of "
                "heads, or set fraction below 1 to rotate an even part"
            )
        R = int(head_dim * fraction) // 2 * 2
        if R == 0:
            raise ValueError(
                f"fraction={fraction} of head_dim={head_dim} is less than 2 numbers; give "
                f"{math.ceil(2000 / head_dim) / 1000:g} or more"
            )
        if stretch == 1 and original_context is not None:
            raise ValueError(
                f"original_context={original_context} has no effect with stretch=1.0; "
                "set stretch too, or set this to null"
            )
        if stretch > 1 and base <= 1:
            raise ValueError(f"base={base} must be above 1 with stretch={stretch}")
        self.base, self.fraction, self.stretch = base, fraction, stretch
        self.context_length, self.original_context = context_length, original_context
        self.pairs: Pairs = pairs
        frequency = base ** (-torch.arange(0, R, 2, dtype=torch.float64) / R)
        amplitude = 1.0
        if stretch > 1:
            frequency *= _slower(R, base, stretch, original_context or context_length / stretch)
            amplitude = 0.1 * math.log(stretch) + 1  # of queries and of keys
        angle_TR = torch.outer(torch.arange(context_length, dtype=torch.float64), frequency)
        if pairs == "half":
            angle_TR = torch.cat([angle_TR, angle_TR], dim=-1)
        else:
            angle_TR = angle_TR.repeat_interleave(2, dim=-1)
        # In float64, because float32 angles are already off by 1e-4 at position 1,000.
        self.register_buffer("cos_TR", amplitude * angle_TR.cos(), persistent=False)
        self.register_buffer("sin_TR", amplitude * angle_TR.sin(), persistent=False)

    def resized(self, head_dim: int, pairs: Pairs | None = None) -> "RotaryPosition":
        options = self.base, self.fraction, self.stretch, self.original_context, pairs or self.pairs
        return RotaryPosition(self.context_length, head_dim, *options)

    def rotate(self, q_BHTD: Tensor, k_BGTD: Tensor, positions: Positions) -> tuple[Tensor, Tensor]:
        index = table_index(positions)
        cos, sin = self.cos_TR[index].to(q_BHTD.dtype), self.sin_TR[index].to(q_BHTD.dtype)
        if cos.ndim == 3:  # [B, T, R]: the same for all heads
            cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return self._turn(q_BHTD, cos, sin), self._turn(k_BGTD, cos, sin)

    def _turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate the first R numbers of each head, as many as the tables have; the others pass."""
        R, D = cos.shape[-1], x.shape[-1]
        if R < D:
            return torch.cat([self._turn(x[..., :R], cos, sin), x[..., R:]], dim=-1)
        if self.pairs == "half":
            first, second = x.chunk(2, dim=-1)
            return x * cos + torch.cat([-second, first], dim=-1) * sin
        first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
        return x * cos + torch.stack([-second, first], dim=-1).flatten(-2) * sin


def _slower(R: int, base: float, stretch: float, original_context: float) -> Tensor:
    """Return YaRN's factor on the frequency of each of the R/2 pairs: 1/stretch to 1."""

    def pair(turns: int) -> float:
        """Return which pair, a real number, turns this often over the original context."""
        return R * math.log(original_context / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = max(math.floor(pair(FAST)), 0), min(math.ceil(pair(SLOW)), R - 1)
    pairs = torch.arange(R // 2, dtype=torch.float64)
    ramp = ((pairs - first) / max(last - first, 1e-3)).clamp(0, 1)
    return 1 - ramp + ramp / stretch
