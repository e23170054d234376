"""A tanh that bounds the scores."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated

from msgspec import Meta
from torch import Tensor

from gptattn.attention.parts.base import Part
from gptattn.attention.rule import Rule


class SoftCap(Part):
    """A scaled score s becomes cap * tanh(s / cap), before any bias, the mask and a sink act.

    Source: Gemma 2, arXiv:2408.00118, sec. 2 (cap 50 in the attention).
    """

    def __init__(self, cap: Annotated[float, Meta(gt=0)] = 50.0) -> None:
        super().__init__()
        self.cap = cap

    def rule(self, rule: Rule, new: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> Rule:
        return replace(rule, softcap=self.cap)
