"""Tensors of several models at once, as `torch.vmap` over their weights makes them."""

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor


def of_several_models(x: Tensor) -> bool:
    """Whether x stands for a tensor of each of several models, inside vmap."""
    return not torch.compiler.is_compiling() and is_batchedtensor(x)


def as_rows(x: Tensor, axis: int | None, models: int, rows: int | None = None) -> Tensor:
    """Return [models * rows, ...] of x [rows, ...], which has the models on `axis`, if it is given.

    Without `axis` x is the same for all models; with `rows`, its one row counts that many times.
    """
    x = x.expand(models, *x.shape) if axis is None else x.movedim(axis, 0)
    return (x if rows is None else x.expand(-1, rows, *x.shape[2:])).flatten(0, 1)
