"""Which parameters weight decay is for."""

from collections.abc import Iterable

from torch import nn


def by_decay(parameters: Iterable[nn.Parameter]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The matrices, which weight decay is for, and the others: the optimizer's two groups."""
    parameters = list(parameters)
    return [p for p in parameters if p.ndim >= 2], [p for p in parameters if p.ndim < 2]
