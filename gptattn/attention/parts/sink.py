"""A learned sink that takes the weight a head has no use for."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from gptattn.attention.parts.base import Part
from gptattn.attention.rule import Rule


class Sink(Part):
    """One learned logit per head that takes part in the softmax and has no value.

    It is neither scaled nor capped, and adds H parameters. They are drawn as in transformers'
    GptOss: near 0, where a sink takes as much weight as a key with score 0.

    Source: gpt-oss model card, OpenAI 2025, arXiv:2508.10925, sec. 2.2.
    """

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.sink_H = nn.Parameter(torch.zeros(num_heads))

    def initialise(self, std: float) -> None:
        self.sink_H.normal_(0.0, std)

    def rule(self, rule: Rule, new: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> Rule:
        return replace(rule, sink_H=self.sink_H)
