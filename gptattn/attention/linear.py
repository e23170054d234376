"""Linear layers that can be prepared for inputs of a few rows, as in decoding.

A product with a few rows costs the time to read the weight from memory. For one row, F.linear reads
it with one thread; for a few rows, it reads slowly. Speedup of decoding with prepared layers on two
cores (AVX512, MKL), by rows:

    rows                          1     8
    model=char                  1.5   1.5
    model=gpt2_small            1.5   3.0
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MAX_ROWS = 32  # for more rows F.linear is as fast
MIN_BYTES = 2**19  # of a weight; reading a smaller one is faster than waking threads or reordering


class PreparedWeight:
    """A weight [out, in] and its bias in the layout that is fastest for inputs of `rows` rows.

    For one row, each thread gets a part of the weight. For a few rows, or in bfloat16, it is a copy
    in oneDNN's layout; making it takes as long as a few decoding steps. Don't change the weight
    afterwards.
    """

    def __init__(self, layer: nn.Linear | nn.Embedding, rows: int) -> None:
        bias = layer.bias if isinstance(layer, nn.Linear) else None
        self.weight = layer.weight.detach()
        self.bias = None if bias is None else bias.detach()
        self.parts, self.packed = 1, None
        if self.weight.device.type != "cpu" or self.weight.nbytes < MIN_BYTES:
            return
        # Batched products are slow in half precision.
        if rows == 1 and self.weight.dtype in (torch.float32, torch.float64):
            self.parts = min(torch.get_num_threads(), len(self.weight))
        elif rows <= MAX_ROWS and _can_pack(self.weight.dtype):
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, rows)

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        rows = x.numel() // x.shape[-1]
        if not torch.is_autocast_enabled("cpu"):
            if rows == 1 and self.parts > 1:
                return self._one_row(x)
            if rows <= MAX_ROWS and self.packed is not None:
                return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)

    def _one_row(self, x: Tensor) -> Tensor:
        """W x + b with a part of W per thread; F.linear would use a single thread."""
        whole = len(self.weight) - len(self.weight) % self.parts
        bias = self.weight.new_zeros(len(self.weight)) if self.bias is None else self.bias
        w_POE = self.weight[:whole].view(self.parts, -1, self.weight.shape[1])
        # A transposed row, because MKL is slow for a column with a column's strides.
        x_PE1 = x.reshape(1, 1, -1).expand(self.parts, -1, -1).mT
        y = torch.baddbmm(bias[:whole].view(self.parts, -1, 1), w_POE, x_PE1)
        if whole < len(self.weight):
            rest = torch.addmv(bias[whole:], self.weight[whole:], x.flatten())
            y = torch.cat([y.flatten(), rest])
        return y.view(*x.shape[:-1], -1)


def _can_pack(dtype: torch.dtype) -> bool:
    """Whether this torch has operators for oneDNN's layout, and they are fast here."""
    ops = torch.ops.mkldnn
    if not (torch.backends.mkldnn.is_available() and hasattr(ops, "_linear_pointwise")):
        return False
    if dtype == torch.bfloat16:
        return ops._is_mkldnn_bf16_supported()  # with AVX512
    return dtype == torch.float32


class Linear(nn.Linear):
    """An nn.Linear that can be prepared: same parameters, initialisation and names."""

    prepared: PreparedWeight | None = None  # not used with gradients

    def forward(self, input: Tensor) -> Tensor:
        if self.prepared is not None and not torch.is_grad_enabled():
            return self.prepared(input)
        return F.linear(input, self.weight, self.bias)


def prepare(module: nn.Module, rows: int | None) -> None:
    """Prepare every `Linear` in the module for inputs of `rows` rows, until prepare(module, None).

    Don't change the weights in between.
    """
    for layer in module.modules():
        if isinstance(layer, Linear):
            vars(layer).pop("prepared", None)  # compiled code checks whether it exists
            if rows is not None:
                layer.prepared = PreparedWeight(layer, rows)
