"""Capabilities that an attention may have: showing its weights, taking parts, and exchanging
weights by head.

A mechanism inherits these besides `Attention`. Code that needs a missing one raises a one-line
error.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gptattn.attention.base import Attention, Carried
from gptattn.attention.parts.part import Part


@dataclass(frozen=True)
class HeadWeights:
    """One layer's weights in the canonical per-head layout through which variants exchange weights.

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


class HasMaps(ABC):
    """An attention that can return its attention weights."""

    @abstractmethod
    def attention_weights(self, x_BTE: Tensor, carried: Carried | None = None) -> Tensor:
        """Return the weights w [B, H, T, T], by the reference path whatever the backend is."""


class HasParts(ABC):
    """An attention that parts can be added to: softmax over heads of queries, keys and values."""

    # Whether the cache holds keys and values of each head, which a part can change.
    keeps_heads: ClassVar[bool] = True
    num_heads: int
    num_kv_heads: int  # 0: it has no keys and values of its own, and parts get them with 0 heads
    head_dim: int

    def takes(self, part: type[Part]) -> bool:
        """Return whether parts of this kind can act in it."""
        return self.keeps_heads or not part.changes_heads()

    @abstractmethod
    def add_part(self, name: str, part: Part) -> None:
        """Add a part under this name; parts act in the order in which they were added.

        Raises ValueError if it does not fit the mechanism or its other parts.
        """


class HasHeads(ABC):
    """An attention that can export its weights as `HeadWeights` and load another variant's."""

    @abstractmethod
    def export_heads(self) -> HeadWeights:
        """Return a copy of the weights in the canonical layout."""

    @abstractmethod
    def load_heads(self, weights: HeadWeights) -> None:
        """Copy canonical weights into this module. Raises ValueError if they do not fit."""

    @abstractmethod
    def names_in_heads(self) -> set[str]:
        """Return the `state_dict()` keys that the layout covers; a subclass may have more."""


def heads_of(attention: Attention, name: str | None = None) -> HasHeads:
    """Return the attention as `HasHeads`.

    Raises ValueError if it lacks that capability, with `name`, by default that of the class.
    """
    if not isinstance(attention, HasHeads):
        raise ValueError(
            f"{name or type(attention).__name__} has no per-head weights to convert; only "
            "attentions with weights for each head, such as mha and gqa, exchange them"
        )
    return attention


def refuse_loss(attention: Attention, kept: set[str]) -> None:
    """Raise ValueError naming the `state_dict()` keys that are neither in the heads nor in `kept`.

    A conversion copies only those two, so it would drop the others.
    """
    inside = heads_of(attention).names_in_heads() | kept
    lost = [name for name in attention.state_dict() if name not in inside]
    if lost:
        raise ValueError(
            f"{', '.join(lost)} of {type(attention).__name__} would be lost; keep the variant"
        )


def copy_into(parameter: Tensor | None, value: Tensor | None, what: str) -> None:
    """Copy `value` into `parameter`; both may be None.

    Raises ValueError, naming `what`, if only one is None or if the shapes differ.
    """
    if parameter is None and value is None:
        return
    if parameter is None or value is None:
        raise ValueError(f"{what} is present on one side only; build both modules alike")
    if parameter.shape != value.shape:
        raise ValueError(
            f"{what} has shape {list(value.shape)}, this module needs {list(parameter.shape)}"
        )
    with torch.no_grad():
        parameter.copy_(value)
