"""Two statistics of a head, computed from its attention weights: entropy and sink mass.

Both leave out the first query of a row or document, which only ever sees itself.
"""

import torch
from torch import Tensor

from gptattn.position.base import Documents


def entropy(w_BHTS: Tensor, documents: Documents | None = None) -> Tensor:
    """Return the mean entropy in nats [H], over batch and queries.

    It is 0 for all weight on one token and ln n for equal weights on n tokens. A weight of 0 adds
    0. NaN if T is 1. Source: Zhai et al. 2023, arXiv:2303.06296, sec. 3.
    """
    w_BHTS = w_BHTS.to(torch.promote_types(w_BHTS.dtype, torch.float32))
    if documents is None:
        return torch.special.entr(w_BHTS[:, :, 1:]).sum(-1).mean((0, 2))
    return torch.special.entr(w_BHTS).sum(-1).movedim(1, -1)[documents.position_BT > 0].mean(0)


def sink_mass(w_BHTS: Tensor, documents: Documents | None = None) -> Tensor:
    """Return the mean weight on the first token [H], over batch and queries. NaN if T is 1.

    With `documents`, it is the first token of the query's own document.

    Source: Xiao et al. 2023, arXiv:2309.17453, sec. 3.1.
    """
    w_BHTS = w_BHTS.to(torch.promote_types(w_BHTS.dtype, torch.float32))
    if documents is None:
        return w_BHTS[:, :, 1:, 0].mean((0, 2))
    first_BHT1 = documents.start_BT[:, None, :, None].expand(-1, w_BHTS.shape[1], -1, -1)
    w_BTH = w_BHTS.gather(-1, first_BHT1).squeeze(-1).movedim(1, -1)
    return w_BTH[documents.position_BT > 0].mean(0)


def even_weights(T: int) -> Tensor:
    """Return uniform causal weights [1, 1, T, T]: query t gives 1 / (t + 1) to each key it sees."""
    ones = torch.ones(1, 1, T, T, dtype=torch.float64).tril()
    return ones / ones.sum(-1, keepdim=True)
