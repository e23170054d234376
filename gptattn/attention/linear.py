"""Linear layers that can be prepared for inputs of a few rows, as in decoding.

The cost of a product with a few rows is reading the weight from memory. F.linear reads it with one
thread for one row, and slowly for a few rows. Measured on two cores (AVX2, MKL): GB/s of GPT-2
small's weights, where a plain sum reads 32:

    rows                  1     2     4     8    16
    F.linear             13     6     7    10     9
    Prepared             32    22    24    22    17

Weights in bfloat16 are half the bytes, and oneDNN's layout is the fastest for one row as well.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

MOST_ROWS = 32  # for more rows F.linear is as fast
JOINED_BYTES = 2**21  # of weights; above, a joint product is no faster than separate ones
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
PACKING = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
WORTH_THREADS = 2**19  # bytes of a weight; below, waking the threads takes as long as reading it


class Preparable(ABC):
    """A module that can store its weights in a layout that is faster for decoding."""

    @abstractmethod
    def prepare(self, rows: int | None) -> None:
        """Optimise for inputs of `rows` rows, until prepare(None).

        Do not change the weights in between: the layout may be a copy of them. While gradients are
        enabled it is not used.
        """


def prepare(module: nn.Module, rows: int | None) -> None:
    """Prepare the module, or if it is not `Preparable`, the modules inside it that are."""
    if isinstance(module, Preparable):
        module.prepare(rows)
    else:
        for child in module.children():
            prepare(child, rows)


class Prepared:
    """The weights [out, in] and biases of layers with the same input, as one product."""

    def __init__(self, layers: Sequence[nn.Linear | nn.Embedding], rows: int) -> None:
        weights = [layer.weight.detach() for layer in layers]
        biases = [layer.bias for layer in layers if isinstance(layer, nn.Linear)]
        given = [bias.detach() for bias in biases if bias is not None]
        self.sizes = [len(weight) for weight in weights]
        self.weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        self.bias = torch.cat(given) if given else None
        self.one_row = self.packed = None
        if self.weight.device.type != "cpu":
            return
        if _worth_parting(self.weight, rows):
            self.one_row = _OneRow(self.weight, self.bias, torch.get_num_threads())
        elif _worth_packing(self.weight, rows):
            # oneDNN's layout. Packing takes as long as a few decoding steps.
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, rows)

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out], with the outputs of all layers one after the other."""
        rows = x.numel() // x.shape[-1]
        if not torch.is_autocast_enabled("cpu"):
            if rows == 1 and self.one_row is not None:
                return self.one_row(x)
            if rows <= MOST_ROWS and self.packed is not None:
                return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)


def _worth_parting(weight: Tensor, rows: int) -> bool:
    """Whether `_OneRow` is the fastest; in half precision batched products are slow."""
    threads = torch.get_num_threads()
    large = weight.nbytes >= WORTH_THREADS and len(weight) >= threads
    return rows == 1 and threads > 1 and large and weight.dtype in (torch.float32, torch.float64)


def _worth_packing(weight: Tensor, rows: int) -> bool:
    """Whether oneDNN's layout is faster and there: for bfloat16 it needs AVX512."""
    ops = torch.ops.mkldnn
    # The operators are private to torch; without them F.linear gives the same result, slower.
    if rows > MOST_ROWS or not all(hasattr(ops, name) for name in PACKING):
        return False
    if weight.dtype == torch.bfloat16:
        return ops._is_mkldnn_bf16_supported()
    return rows > 1 and weight.dtype == torch.float32 and torch.backends.mkldnn.is_available()


class _OneRow:
    """W x + b for one row, with a part of W per thread; torch would use a single thread."""

    def __init__(self, weight: Tensor, bias: Tensor | None, parts: int) -> None:
        bias = weight.new_zeros(len(weight)) if bias is None else bias
        self.parts, whole = parts, len(weight) - len(weight) % parts
        self.w_POE = weight[:whole].view(parts, -1, weight.shape[1])
        self.b_PO1 = bias[:whole].view(parts, -1, 1)
        self.rest = (bias[whole:], weight[whole:]) if whole < len(weight) else None

    def __call__(self, x: Tensor) -> Tensor:
        # A transposed row, because MKL is slow for a column that has a column's own strides.
        x_PE1 = x.reshape(1, 1, -1).expand(self.parts, -1, -1).mT
        y = torch.baddbmm(self.b_PO1, self.w_POE, x_PE1)
        if self.rest is not None:
            y = torch.cat([y.flatten(), torch.addmv(*self.rest, x.flatten())])
        return y.view(*x.shape[:-1], -1)


class Linear(nn.Linear, Preparable):
    """An nn.Linear that can be prepared: same parameters, initialisation and names."""

    _prepared: Prepared | None = None

    def prepare(self, rows: int | None) -> None:
        self._prepared = None if rows is None else Prepared([self], rows)

    def forward(self, input: Tensor) -> Tensor:
        if self._prepared is not None and not torch.is_grad_enabled():
            return self._prepared(input)
        return F.linear(input, self.weight, self.bias)


class Joint:
    """Applies layers with the same input, as one product where that is faster.

    It is faster when prepared, and for many rows with small weights on the CPU, where every
    separate product waits for its threads.
    """

    def __init__(self) -> None:
        self._prepared: Prepared | None = None

    def prepare(self, layers: Sequence[nn.Module], rows: int | None) -> None:
        """Prepare the layers for inputs of `rows` rows if they can be joined; None undoes it."""
        ours = _joinable(layers)
        self._prepared = None if rows is None or ours is None else Prepared(ours, rows)

    @property
    def prepared(self) -> bool:
        """Whether the next call is one product of prepared weights."""
        return self._prepared is not None and not torch.is_grad_enabled()

    def __call__(self, x: Tensor, layers: Sequence[nn.Module]) -> Sequence[Tensor]:
        """Return the output of each layer for x [..., in]."""
        if self._prepared is not None and not torch.is_grad_enabled():
            return self._prepared(x).split(self._prepared.sizes, dim=-1)
        # For a few rows reading the weights is the whole cost, and joining reads them once more.
        many = x.device.type == "cpu" and x.numel() > MOST_ROWS * x.shape[-1]
        ours = _joinable(layers) if many else None
        if ours is None or sum(layer.weight.nbytes for layer in ours) > JOINED_BYTES:
            return [layer(x) for layer in layers]
        weights: list[Tensor] = [layer.weight for layer in ours]
        biases: list[Tensor] = [layer.bias for layer in ours if layer.bias is not None]
        y = F.linear(x, torch.cat(weights), torch.cat(biases) if biases else None)
        return y.split([len(weight) for weight in weights], dim=-1)


def _joinable(layers: Sequence[nn.Module]) -> list[Linear] | None:
    """Return the layers if one product can replace them, else None.

    A layer that is replaced, compiled or hooked (also by a global hook) must be called itself, so
    it is not joined; nor are layers of which only some have a bias.
    """
    ours = [layer for layer in layers if type(layer) is Linear and not _must_be_called(layer)]
    alike = len({layer.bias is None for layer in ours}) == 1
    return ours if alike and len(ours) == len(layers) else None


def _must_be_called(layer: Linear) -> bool:
    hooked = any(getattr(layer, hooks) for hooks in HOOKS) or bool(_has_any_global_hook())
    return hooked or "forward" in vars(layer) or layer._compiled_call_impl is not None
