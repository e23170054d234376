"""Which parameters get weight decay."""

from collections.abc import Iterable

from torch import nn


def by_decay(parameters: Iterable[nn.Parameter]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Split parameters into the optimizer's two groups: matrices, which decay, and the others."""
    parameters = list(parameters)
    return [p for p in parameters if p.ndim >= 2], [p for p in parameters if p.ndim < 2]
