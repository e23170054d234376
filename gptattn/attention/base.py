"""The contract that every attention variant keeps, and the legend of shape letters.

Letters, one per axis, in tensor names and in einsum alike:

    B batch    T query tokens    S key tokens (S >= T with a cache)    E model width
    H query heads    G key/value heads (groups)    R = H / G    D head size
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor, nn

from gptattn.attention.cache import Cache
from gptattn.position.base import Documents, Positions


@dataclass
class Carried:
    """State that one forward pass hands from layer to layer, besides the stream x [B, T, E].

    A layer may store what later layers need (its keys or values) in `left`, under a name it
    chooses.
    """

    positions: Positions  # of the T tokens; Documents, if rows have several that are kept apart
    left: dict[str, Any] = field(default_factory=dict)


class Attention(nn.Module, ABC):
    """Causal self-attention: x [B, T, d_in] -> y [B, T, d_out], T <= context_length.

    Parameters are counted from `parameters()`, cache bytes from `new_cache` on the meta device.
    Optional capabilities are classes to inherit in addition: `HasMaps`, `HasHeads`.
    """

    knows_order: ClassVar[bool] = False  # whether it needs no position encoding, and takes none
    keeps_documents: ClassVar[bool] = False  # whether `Carried.positions` may be Documents
    d_in: int
    d_out: int
    context_length: int

    @abstractmethod
    def forward(
        self, x_BTE: Tensor, cache: Cache | None = None, carried: Carried | None = None
    ) -> Tensor:
        """Attend causally: x [B, T, d_in] -> y [B, T, d_out].

        With a cache, x holds the tokens after the `cache.length` cached ones, and the caller
        advances the cache once per step. A layer used on its own needs no `carried`. Raises
        ValueError past `context_length`.
        """

    @abstractmethod
    def new_cache(self, batch: int, capacity: int) -> Cache:
        """Return an empty cache for `batch` rows and `capacity` tokens, on the weights' device."""

    @abstractmethod
    def flops(self, T: int, S: int) -> int:
        """Return the FLOPs of scores and weighted sum for one row: T queries, the last of S tokens.

        A multiply-add counts as two, and only pairs that the mask allows count. Projections are not
        included; they are counted from their weights.
        """

    def leaves(self) -> dict[str, str]:
        """Return what it leaves in `Carried.left`: name -> the sizes that later layers rely on."""
        return {}

    def needs(self) -> dict[str, str]:
        """Return what it reads from `Carried.left`, as `leaves` of an earlier layer gives it."""
        return {}

    def layer_order(self) -> str | None:
        """Return which layers must stand where, if what it needs or leaves asks for more than one.

        It is the advice of an error, such as "give 2 such layers in a row". None: it needs no more
        than another layer that takes or leaves the same.
        """
        return None

    def initialise(self, std: float) -> None:
        """Draw the weights as the mechanism's paper does; called once, without gradients.

        This default draws every Linear weight from N(0, std), as GPT-2 does, and sets biases to 0.
        Other parameters keep the values that the constructor gave them.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0.0, std)
                if module.bias is not None:
                    module.bias.zero_()

    def residual_writer(self) -> nn.Linear | None:
        """Return the layer that writes to the residual stream, or None.

        The model draws that layer's weights with a smaller std.
        """
        return None

    def begin(self, x_BTE: Tensor, cache: Cache | None, carried: Carried | None) -> Carried:
        """Return `carried`; if it is None, one whose positions follow the cache.

        Raises ValueError past `context_length`, and for documents that cannot be kept apart.
        """
        start = 0 if cache is None else cache.length
        stop = start + x_BTE.shape[1]
        if stop > self.context_length:
            raise ValueError(
                f"{stop} tokens do not fit context_length={self.context_length}; "
                "pass fewer tokens or build with a longer context"
            )
        if carried is None:
            return Carried(range(start, stop))
        if isinstance(carried.positions, Documents) and not (
            cache is None and self.keeps_documents
        ):
            which = type(self).__name__ if cache is None else "a cache"
            raise ValueError(f"documents: {which} cannot keep those of a row apart; leave them out")
        return carried


def divisors(n: int) -> list[int]:
    """Return the divisors of n in ascending order."""
    small = [i for i in range(1, math.isqrt(n) + 1) if n % i == 0]
    return sorted({*small, *(n // i for i in small)})


def window_of(window: float | None, context_length: int) -> int | None:
    """Return the window in tokens; a share of the context, below 1, is rounded up.

    Raises ValueError if it is not from 1 to context_length.
    """
    if isinstance(window, float) and 0 < window < 1:
        return math.ceil(round(window * context_length, 9))  # 0.07 * 100 is 7.000000000000001
    if window is not None and not (isinstance(window, int) and 1 <= window <= context_length):
        raise ValueError(
            f"window={window} does not fit context_length={context_length}; give 1 to "
            f"{context_length} tokens, the token itself included, a share of the context below 1, "
            "or null for all tokens"
        )
    return window


def check_sizes(d_out: int, num_heads: int, num_kv_heads: int, dropout: float) -> None:
    """Raise ValueError for impossible sizes; the message starts with the argument's name."""
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
