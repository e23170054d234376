"""Which parameters get weight decay, and which are matrices of the layers."""

from collections.abc import Iterable

from torch import nn

from gptattn.model.gpt import GPT


def by_decay(parameters: Iterable[nn.Parameter]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Split parameters into the optimizer's two groups: matrices, which decay, and the others."""
    parameters = list(parameters)
    return [p for p in parameters if p.ndim >= 2], [p for p in parameters if p.ndim < 2]


def layer_matrices(model: GPT) -> set[nn.Parameter]:
    """Return the matrices inside the layers: no embedding, no head, no convolution."""
    return {p for block in model.layers() for p in block.parameters() if p.ndim == 2}
