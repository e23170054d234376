"""Linear layers that can be prepared for inputs of a few rows, as in decoding.

The cost of a product with a few rows is reading the weight from memory. F.linear reads it with one
thread for one row, and slowly for a few rows. Speedup of decoding with prepared layers on two cores
(AVX512, MKL), by rows:

    rows                          1     8
    model=char                  1.5   1.5
    model=gpt2_small            1.5   3.0
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MAX_ROWS = 32  # for more rows F.linear is as fast
PACKING = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
MIN_BYTES = 2**19  # of a weight; a smaller one is read faster than threads wake or x is reordered


class PreparedWeight:
    """A weight [out, in] and its bias in the layout that is fastest for inputs of `rows` rows.

    Do not change the weight afterwards: the layout may be a copy of it.
    """

    def __init__(self, layer: nn.Linear | nn.Embedding, rows: int) -> None:
        bias = layer.bias if isinstance(layer, nn.Linear) else None
        self.weight = layer.weight.detach()
        self.bias = None if bias is None else bias.detach()
        self.parts, self.packed = 0, None
        if self.weight.device.type == "cpu":
            if rows == 1 and _worth_parting(self.weight):
                self.parts = torch.get_num_threads()
            elif _worth_packing(self.weight, rows):
                # oneDNN's layout. Packing takes as long as a few decoding steps.
                self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, rows)

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        rows = x.numel() // x.shape[-1]
        if not torch.is_autocast_enabled("cpu"):
            if rows == 1 and self.parts:
                return self._one_row(x)
            if rows <= MAX_ROWS and self.packed is not None:
                return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)

    def _one_row(self, x: Tensor) -> Tensor:
        """W x + b with a part of W per thread; F.linear would use a single thread."""
        whole = len(self.weight) - len(self.weight) % self.parts
        bias = self.weight.new_zeros(len(self.weight)) if self.bias is None else self.bias
        w_POE = self.weight[:whole].view(self.parts, -1, self.weight.shape[1])
        # A transposed row, because MKL is slow for a column that has a column's own strides.
        x_PE1 = x.reshape(1, 1, -1).expand(self.parts, -1, -1).mT
        y = torch.baddbmm(bias[:whole].view(self.parts, -1, 1), w_POE, x_PE1)
        if whole < len(self.weight):
            rest = torch.addmv(bias[whole:], self.weight[whole:], x.flatten())
            y = torch.cat([y.flatten(), rest])
        return y.view(*x.shape[:-1], -1)


def _worth_parting(weight: Tensor) -> bool:
    """Whether a part per thread is fastest; in half precision batched products are slow."""
    threads = torch.get_num_threads()
    large = weight.nbytes >= MIN_BYTES and len(weight) >= threads
    return threads > 1 and large and weight.dtype in (torch.float32, torch.float64)


def _worth_packing(weight: Tensor, rows: int) -> bool:
    """Whether oneDNN's layout is available and faster: for bfloat16 it needs AVX512."""
    ops = torch.ops.mkldnn
    # The operators are private to torch; without them F.linear gives the same result, slower.
    if rows > MAX_ROWS or weight.nbytes < MIN_BYTES:
        return False
    if not all(hasattr(ops, name) for name in PACKING):
        return False
    if weight.dtype == torch.bfloat16:
        return ops._is_mkldnn_bf16_supported()
    return rows > 1 and weight.dtype == torch.float32 and torch.backends.mkldnn.is_available()


class Linear(nn.Linear):
    """An nn.Linear that can be prepared: same parameters, initialisation and names."""

    _prepared: PreparedWeight | None = None

    def prepare(self, rows: int | None) -> None:
        """Optimise for inputs of `rows` rows, until prepare(None); not used with gradients."""
        self._prepared = None if rows is None else PreparedWeight(self, rows)

    def forward(self, input: Tensor) -> Tensor:
        if self._prepared is not None and not torch.is_grad_enabled():
            return self._prepared(input)
        return F.linear(input, self.weight, self.bias)


def prepare(module: nn.Module, rows: int | None) -> None:
    """Prepare every `Linear` in the module for inputs of `rows` rows, until prepare(module, None).

    Do not change the weights in between.
    """
    for layer in module.modules():
        if isinstance(layer, Linear):
            layer.prepare(rows)
