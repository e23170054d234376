"""The contract that every attention variant keeps, and the legend of shape letters.

Letters, one per axis, in tensor names and in einsum alike:

    B batch    T query tokens    S key tokens (S >= T with a cache)    E model width
    H query heads    G key/value heads (groups)    R = H / G    D head size
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gptattn.attention.cache import Cache


@dataclass(frozen=True)
class HeadWeights:
    """One layer's weights in the canonical per-head layout that all variants read and write.

    Query head h reads key/value head h // (H / G). A missing bias or output projection is None.
    """

    q_HDE: Tensor
    k_GDE: Tensor
    v_GDE: Tensor
    q_bias_HD: Tensor | None
    k_bias_GD: Tensor | None
    v_bias_GD: Tensor | None
    out_EHD: Tensor | None
    out_bias_E: Tensor | None


class Attention(nn.Module, ABC):
    """Causal self-attention: x [B, T, d_in] -> y [B, T, d_out], T <= context_length.

    Parameters are counted from `parameters()`, cache bytes from `new_cache` on the meta device.
    """

    d_in: int
    d_out: int
    context_length: int
    out_proj: nn.Linear | None  # writes into the residual stream; GPT-2 initialises it smaller

    @abstractmethod
    def forward(self, x_BTE: Tensor, cache: Cache | None = None) -> Tensor:
        """Attend causally. With a cache, x holds the tokens that follow `cache.length` others.

        The caller advances the cache, once per step. Raises ValueError past `context_length`.
        """

    @abstractmethod
    def new_cache(self, batch: int, capacity: int) -> Cache:
        """An empty cache for `batch` rows of up to `capacity` tokens, on the weights' device."""

    @abstractmethod
    def attention_weights(self, x_BTE: Tensor) -> Tensor:
        """The weights w [B, H, T, T], through the reference path whatever backend trains."""

    @abstractmethod
    def flops(self, T: int, S: int) -> int:
        """Multiply-adds times two of scores and mix, one row: T queries, the last of S tokens.

        Only pairs the mask lets through count. Projections are counted from their weights.
        """

    @abstractmethod
    def export_heads(self) -> HeadWeights:
        """A copy of the weights in the canonical layout."""

    @abstractmethod
    def load_heads(self, weights: HeadWeights) -> None:
        """Take over weights in the canonical layout. Raises ValueError where they do not fit."""

    def check_length(self, length: int) -> None:
        if length > self.context_length:
            raise ValueError(
                f"{length} tokens do not fit context_length={self.context_length}; "
                "pass fewer tokens or build with a longer context"
            )


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


def copy_into(parameter: Tensor | None, value: Tensor | None, what: str) -> None:
    """Copy `value` into `parameter`, both given or both None, and of one shape."""
    if parameter is None and value is None:
        return
    if parameter is None or value is None:
        raise ValueError(f"{what} is present on one side only; build both modules alike")
    if parameter.shape != value.shape:
        raise ValueError(
            f"{what} has shape {list(value.shape)}, this module takes {list(parameter.shape)}"
        )
    with torch.no_grad():
        parameter.copy_(value)
