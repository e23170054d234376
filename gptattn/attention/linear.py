"""nn.Linear that is quick on a few rows, as in decoding."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEW_ROWS = 32  # measured: up to here the batched form is faster, 1.2 to 1.9 times


class Linear(nn.Linear):
    """y = x W^T + b, with nn.Linear's parameters, initialisation and names."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear; without gradients, for few rows on the CPU, on all threads.

    x [..., in], weight [out, in]. The matrix product of MKL reads the weight of a single row with
    one thread (13 GB/s, where two read 24). As a batch of parts of the weight it takes all.
    """
    rows = x.numel() // x.shape[-1]
    if (
        rows > FEW_ROWS
        or torch.is_grad_enabled()
        or x.device.type != "cpu"
        or torch.is_autocast_enabled("cpu")
    ):
        return F.linear(x, weight, bias)
    parts = torch.get_num_threads()
    if parts == 1 or len(weight) < parts:
        return F.linear(x, weight, bias)
    each, rest = divmod(len(weight), parts)
    if rest:
        most = each * parts
        y = linear(x, weight[:most], None if bias is None else bias[:most])
        end = F.linear(x, weight[most:], None if bias is None else bias[most:])
        return torch.cat([y, end], dim=-1)
    x_PRE = x.reshape(1, rows, -1).expand(parts, -1, -1)
    w_PEO = weight.view(parts, each, -1).transpose(1, 2)
    if bias is None:
        y_PRO = torch.bmm(x_PRE, w_PEO)
    else:
        y_PRO = torch.baddbmm(bias.view(parts, 1, each), x_PRE, w_PEO)
    return y_PRO.transpose(0, 1).reshape(*x.shape[:-1], -1)
