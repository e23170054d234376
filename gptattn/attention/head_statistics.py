"""What a head does, in two numbers, from its attention weights.

The first query of a row sees itself alone, whatever was learned: it has no part in either.
"""

import torch
from torch import Tensor


def entropy(w_BHTS: Tensor) -> Tensor:
    """Mean entropy in nats [H], over batch and queries: 0 looks at one token, ln n at n evenly.

    A weight of 0 adds 0. NaN where T is 1. Source: Zhai et al. 2023, arXiv:2303.06296, sec. 3.
    """
    w_BHTS = w_BHTS.to(torch.promote_types(w_BHTS.dtype, torch.float32))
    return torch.special.entr(w_BHTS[:, :, 1:]).sum(-1).mean((0, 2))


def sink_mass(w_BHTS: Tensor) -> Tensor:
    """Mean weight on the first token [H], over batch and queries. NaN where T is 1.

    Source: Xiao et al. 2023, arXiv:2309.17453, sec. 3.1.
    """
    w_BHTS = w_BHTS.to(torch.promote_types(w_BHTS.dtype, torch.float32))
    return w_BHTS[:, :, 1:, 0].mean((0, 2))


def even_weights(T: int) -> Tensor:
    """What a head without any preference has, [1, 1, T, T]: query t gives 1 / (t + 1) to each."""
    ones = torch.ones(1, 1, T, T, dtype=torch.float64).tril()
    return ones / ones.sum(-1, keepdim=True)
