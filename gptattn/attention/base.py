"""The contract for every attention mechanism, and the shape letters.

One letter per axis, in tensor names and in einsum:

    B batch    T query tokens    S key tokens (S >= T with a cache)    E model width
    H query heads    G key/value heads (groups)    R = H / G    D head size
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from gptattn.attention.cache import Cache
from gptattn.machine.device import Toolchain
from gptattn.position.base import Documents, Positions

Reach = tuple[int | None, int | None]  # window and chunk
Masks = Mapping[Reach, BlockMask]


@dataclass
class Shared:
    """State that layers share: what a forward pass carries besides the stream x [B, T, E].

    `state`: a layer stores what later layers need (keys or values) under a name of its choice, and
    reads what it `needs`. `losses`: in training, a layer with its own loss appends it, a scalar,
    under the loss's name; the training loop adds them up. `masks`: a layer with backend=flex looks
    its block mask up here, and uses sdpa if it is missing; None: the layer makes its mask itself.
    `cache`: the layer's cache, for its parts.
    """

    positions: Positions  # of T tokens; Documents keeps a row's documents apart
    state: dict[str, Any] = field(default_factory=dict)
    losses: dict[str, list[Tensor]] | None = None  # None: not wanted
    masks: Masks | None = None
    cache: Cache | None = None


class Attention(nn.Module, ABC):
    """Causal self-attention: x [B, T, d_in] -> y [B, T, d_out], T <= context_length.

    Parameters are counted from `parameters()`, cache bytes from `new_cache` on the meta device.
    Optional abilities have their own classes: `HasMaps`, `HasHeads`.
    """

    knows_order: ClassVar[bool] = False  # works without a position encoding, and takes none
    keeps_documents: ClassVar[bool] = False  # accepts Documents as `Shared.positions`
    decodes_from_cache: ClassVar[bool] = True  # False: each step reruns the whole prefix
    stops_gradient: ClassVar[bool] = False  # on purpose, as before choosing or rounding
    shares_freely: ClassVar[bool] = False  # later layers can ignore what it `provides`
    plain_backend: ClassVar[str] = ""  # what `auto` means on a CPU; "": it has none
    d_in: int
    d_out: int
    context_length: int

    @property
    def title(self) -> str:
        """The mechanism's name in messages."""
        return type(self).__name__

    @abstractmethod
    def forward(
        self, x_BTE: Tensor, cache: Cache | None = None, shared: Shared | None = None
    ) -> Tensor:
        """Attend causally: x [B, T, d_in] -> y [B, T, d_out].

        With a cache, x holds the tokens after the `cache.length` cached ones, and the caller
        advances the cache once per step. A layer used on its own needs no `shared`. Raises
        ValueError past `context_length`.
        """

    @abstractmethod
    def new_cache(self, batch: int, capacity: int) -> Cache:
        """Return an empty cache for `batch` rows and `capacity` tokens, on the weights' device."""

    @abstractmethod
    def flops(self, T: int, S: int) -> int:
        """Return one row's FLOPs of scores and weighted sums; queries are the last T of S tokens.

        T = S counts the training form, T < S the decoding form. A multiply-add is two FLOPs, and
        only pairs that the mask allows count. Projections are left out: they are counted from their
        weights.
        """

    def provides(self) -> dict[str, str]:
        """Return the names that it stores in `Shared.state`, with the sizes that readers need."""
        return {}

    def needs(self) -> dict[str, str]:
        """Return the names that it reads from `Shared.state`, with sizes, as in `provides`."""
        return {}

    def make_masks(self, x_BTE: Tensor, positions: Positions) -> Masks:
        """Return the block masks that it looks up in `Shared.masks`; x gives T and the device."""
        return {}

    def choose_backend(
        self, x_BTE: Tensor, shared: Shared, dtype: torch.dtype, tools: Toolchain
    ) -> tuple[str, str]:
        """Return `auto`'s backend on a GPU for products in `dtype`, and why not a faster one."""
        return self.plain_backend, ""

    def initialise(self, std: float) -> None:
        """Draw the weights as the mechanism's paper does; called once, without gradients.

        By default every Linear weight is drawn from N(0, std), as in GPT-2, and biases are 0. Other
        parameters keep their values from the constructor.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0.0, std)
                if module.bias is not None:
                    module.bias.zero_()

    def residual_writer(self) -> nn.Linear | None:
        """Return the layer that writes to the residual stream, by default `out_proj`, or None.

        The model draws that layer's weights with a smaller std.
        """
        return getattr(self, "out_proj", None)

    def begin(self, x_BTE: Tensor, cache: Cache | None, shared: Shared | None) -> Shared:
        """Return `shared` or, if it is None, a new one with the positions that follow the cache.

        Raises ValueError past `context_length`, and for documents that cannot be kept apart.
        """
        start = 0 if cache is None else cache.length
        stop = start + x_BTE.shape[1]
        if stop > self.context_length:
            raise ValueError(
                f"{stop} tokens do not fit context_length={self.context_length}; "
                "pass fewer tokens or build with a longer context"
            )
        if shared is None:
            return Shared(range(start, stop))
        if isinstance(shared.positions, Documents) and not (cache is None and self.keeps_documents):
            which = self.title if cache is None else "a cache"
            raise ValueError(f"documents: {which} cannot keep them apart; pass one in each row")
        return shared


@runtime_checkable
class HasMaps(Protocol):
    """An attention that can show its attention weights."""

    def attention_weights(self, x_BTE: Tensor, shared: Shared | None = None) -> Tensor:
        """Return the weights [B, H, T, T], always computed by the reference path."""
        ...


@dataclass(frozen=True)
class HeadWeights:
    """One layer's weights by head: the common layout in which variants exchange weights.

    Query head h reads key/value head h // (H / G). A missing bias or output projection is None.
    """

    q_HDE: Tensor
    k_GDE: Tensor
    v_GDE: Tensor
    q_bias_HD: Tensor | None = None
    k_bias_GD: Tensor | None = None
    v_bias_GD: Tensor | None = None
    out_EHD: Tensor | None = None
    out_bias_E: Tensor | None = None


# Field of `HeadWeights` -> the parameter that holds it, and its name in errors.
LAYOUT = {
    "q_HDE": ("W_query.weight", "query weight"),
    "k_GDE": ("W_key.weight", "key weight"),
    "v_GDE": ("W_value.weight", "value weight"),
    "q_bias_HD": ("W_query.bias", "query bias"),
    "k_bias_GD": ("W_key.bias", "key bias"),
    "v_bias_GD": ("W_value.bias", "value bias"),
    "out_EHD": ("out_proj.weight", "output weight"),
    "out_bias_E": ("out_proj.bias", "output bias"),
}


class HasHeads(Attention):
    """An attention that exports and loads its four projections as `HeadWeights`."""

    head_dim: int

    def modules_of_heads(self) -> list[str]:
        """Return the paths of the modules that hold W_query, W_key and W_value, in head order."""
        return [""]

    def places_of_heads(self) -> dict[str, list[str]]:
        """Return the `state_dict()` keys of each field of `HeadWeights`; none if it is None."""
        stored, places = self.state_dict().keys(), {}
        for key, (name, _) in LAYOUT.items():
            modules = [""] if name.startswith("out_proj") else self.modules_of_heads()
            places[key] = [module + name for module in modules if module + name in stored]
        return places

    def export_heads(self) -> HeadWeights:
        """Return a copy of the weights by head."""
        fields: dict[str, Any] = {}
        for key, names in self.places_of_heads().items():
            if names:
                fields[key] = torch.cat([self.get_parameter(name).detach() for name in names])
                if key != "out_bias_E":
                    axis = 1 if key == "out_EHD" else 0
                    fields[key] = fields[key].unflatten(axis, (-1, self.head_dim))
        return HeadWeights(**fields)

    @torch.no_grad()
    def load_heads(self, weights: HeadWeights) -> None:
        """Copy these weights into the module. Raises ValueError if they do not fit."""
        current = self.export_heads()
        for key, names in self.places_of_heads().items():
            new, old, what = getattr(weights, key), getattr(current, key), LAYOUT[key][1]
            if (new is None) != (old is None):
                raise ValueError(f"only one of the modules has the {what}; build both the same way")
            if new is None:
                continue
            if new.shape != old.shape:
                raise ValueError(
                    f"{what} has shape {list(new.shape)}, but this module needs {list(old.shape)}"
                )
            for name, part in zip(names, new.chunk(len(names)), strict=True):
                parameter = self.get_parameter(name)
                parameter.copy_(part.reshape(parameter.shape))


def divisors(n: int) -> list[int]:
    """Return the divisors of n in ascending order."""
    return [i for i in range(1, n + 1) if n % i == 0]


def window_of(window: float | None, context_length: int, name: str = "window") -> int | None:
    """Return the window in tokens. A share of the context, below 1, is rounded up.

    Raises ValueError, naming the argument `name`, unless the result is 1 to context_length.
    """
    if isinstance(window, float) and 0 < window < 1:
        return math.ceil(round(window * context_length, 9))  # 0.07 * 100 is 7.000000000000001
    if window is not None and not (isinstance(window, int) and 1 <= window <= context_length):
        raise ValueError(
            f"{name}={window} does not fit context_length={context_length}; give 1 to "
            f"{context_length} tokens or, below 1, a share of the context"
        )
    return window


def rank_of(name: str, rank: float, width: int, most: int) -> int:
    """Return the rank. A share of the width is rounded to a multiple of 8 if `most` allows.

    Raises ValueError, naming the argument `name`, unless the result is 1 to `most`.
    """
    if isinstance(rank, float) and 0 < rank < 1:
        return min(most, max(8, 8 * round(rank * width / 8)))
    if not (isinstance(rank, int) and 1 <= rank <= most):
        raise ValueError(
            f"{name}={rank} does not fit; give 1 to {most} (more would compress nothing), or, "
            "below 1, a share of the width"
        )
    return rank


def check_sizes(d_out: int, num_heads: int, num_kv_heads: int) -> None:
    """Raise ValueError for impossible sizes; the message starts with the argument's name."""
    if num_heads < 1 or d_out % num_heads:
        raise ValueError(
            f"num_heads={num_heads} must divide d_out={d_out} (the model's width); "
            f"use one of {divisors(d_out)}"
        )
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"num_kv_heads={num_kv_heads} must divide num_heads={num_heads}; "
            f"use one of {divisors(num_heads)}"
        )
