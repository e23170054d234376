"""What not every attention has: weights to look at, and heads whose weights others can take over.

A mechanism inherits these beside `Attention`, and is refused in one line where it lacks what is
asked for.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from gptattn.attention.base import Attention, Carried


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


class HasMaps(ABC):
    """An attention whose weights can be looked at."""

    @abstractmethod
    def attention_weights(self, x_BTE: Tensor, carried: Carried | None = None) -> Tensor:
        """The weights w [B, H, T, T], through the reference path whatever backend trains."""


class HasHeads(ABC):
    """An attention that speaks the canonical layout, so that others can take its weights over."""

    @abstractmethod
    def export_heads(self) -> HeadWeights:
        """A copy of the weights in the canonical layout."""

    @abstractmethod
    def load_heads(self, weights: HeadWeights) -> None:
        """Take over weights in the canonical layout. Raises ValueError where they do not fit."""

    @abstractmethod
    def names_in_heads(self) -> set[str]:
        """The entries of `state_dict()` that the layout holds; a subclass may have others."""


def heads_of(attention: Attention) -> HasHeads:
    """This attention, by its heads. Raises ValueError where it has none to be had."""
    if not isinstance(attention, HasHeads):
        raise ValueError(f"{type(attention).__name__} has no heads whose weights others can take")
    return attention


def refuse_loss(attention: Attention, kept: set[str]) -> None:
    """Raise ValueError naming what would be lost if its heads and `kept` alone were taken over."""
    inside = heads_of(attention).names_in_heads() | kept
    lost = [name for name in attention.state_dict() if name not in inside]
    if lost:
        raise ValueError(f"{', '.join(lost)} of {type(attention).__name__} would be lost")


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
