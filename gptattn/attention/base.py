"""The contract that every attention variant keeps, and the legend of shape letters.

Letters, one per axis, in tensor names and in einsum alike:

    B batch    T query tokens    S key tokens (S >= T with a cache)    E model width
    H query heads    G key/value heads (groups)    R = H / G    D head size
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from gptattn.attention.cache import Cache
from gptattn.position.base import Positions


@dataclass
class Carried:
    """What one forward pass carries from layer to layer, beside the stream x [B, T, E].

    A layer may leave what later ones need (its values, its keys) in `left`, by a name of its own.
    """

    positions: Positions  # of the T tokens
    documents_BT: Tensor | None = None  # a number for each token; None: a row is one document
    left: dict[str, Any] = field(default_factory=dict)


class Attention(nn.Module, ABC):
    """Causal self-attention: x [B, T, d_in] -> y [B, T, d_out], T <= context_length.

    Parameters are counted from `parameters()`, cache bytes from `new_cache` on the meta device.
    What not every mechanism has is a class of its own to inherit beside: `HasMaps`, `HasHeads`.
    """

    d_in: int
    d_out: int
    context_length: int

    @abstractmethod
    def forward(
        self, x_BTE: Tensor, cache: Cache | None = None, carried: Carried | None = None
    ) -> Tensor:
        """Attend causally. With a cache, x holds the tokens that follow `cache.length` others.

        The caller advances the cache, once per step. A layer used alone needs nothing `carried`.
        Raises ValueError past `context_length`.
        """

    @abstractmethod
    def new_cache(self, batch: int, capacity: int) -> Cache:
        """An empty cache for `batch` rows of up to `capacity` tokens, on the weights' device."""

    @abstractmethod
    def flops(self, T: int, S: int) -> int:
        """Multiply-adds times two of scores and mix, one row: T queries, the last of S tokens.

        Only pairs the mask lets through count. Projections are counted from their weights.
        """

    def initialise(self, std: float) -> None:
        """Draw the weights, once, as the mechanism's paper does; called without gradients.

        Here every Linear's from N(0, std), which is GPT-2's, with biases of 0; what a constructor
        has put into other parameters stays.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0.0, std)
                if module.bias is not None:
                    module.bias.zero_()

    def residual_writer(self) -> nn.Linear | None:
        """The layer that writes into the residual stream, if the model shall draw it smaller."""
        return None

    def begin(self, x_BTE: Tensor, cache: Cache | None, carried: Carried | None) -> Carried:
        """What is carried, or what a layer goes by alone. Raises ValueError past the context."""
        start = 0 if cache is None else cache.length
        stop = start + x_BTE.shape[1]
        if stop > self.context_length:
            raise ValueError(
                f"{stop} tokens do not fit context_length={self.context_length}; "
                "pass fewer tokens or build with a longer context"
            )
        return Carried(range(start, stop)) if carried is None else carried


def divisors(n: int) -> list[int]:
    small = [i for i in range(1, math.isqrt(n) + 1) if n % i == 0]
    return sorted({*small, *(n // i for i in small)})


def check_sizes(d_out: int, num_heads: int, num_kv_heads: int, dropout: float) -> None:
    """Raise ValueError, opening with the argument's name, where the sizes cannot work."""
    if num_heads < 1 or d_out % num_heads:
        raise ValueError(
            f"num_heads={num_heads} must divide d_out={d_out} (the model's width); "
            f"one of {divisors(d_out)}"
        )
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"num_kv_heads={num_kv_heads} must divide num_heads={num_heads}; "
            f"one of {divisors(num_heads)}"
        )
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout={dropout} must lie in [0, 1); 0 switches it off")
