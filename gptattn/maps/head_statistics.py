"""Two statistics of a head, computed from its attention weights: entropy and sink mass.

Both leave out the first query of a row or document, which sees only itself.
"""

import torch
from torch import Tensor

from gptattn.position.base import Documents


def measure_heads(w_BHTS: Tensor, documents: Documents | None = None) -> tuple[Tensor, Tensor]:
    """Return each head's entropy in nats [H] and sink mass [H]: means over batch and queries.

    The entropy is 0 for all weight on one token and ln n for equal weights on n tokens; a weight of
    0 adds 0. The sink mass is the weight on the first token or, with `documents`, on the first
    token of the query's document. Both are NaN if T is 1.

    Sources: Zhai et al. 2023, arXiv:2303.06296, sec. 3; Xiao et al. 2023, arXiv:2309.17453, sec.
    3.1.
    """
    w_BHTS = w_BHTS.to(torch.promote_types(w_BHTS.dtype, torch.float32))
    if documents is None:
        later_BHTS = w_BHTS[:, :, 1:]
        entropy_BHT = torch.special.entr(later_BHTS).sum(-1)
        return entropy_BHT.mean((0, 2)), later_BHTS[..., 0].mean((0, 2))
    first_BHT1 = documents.start_BT[:, None, :, None].expand(-1, w_BHTS.shape[1], -1, -1)
    both = torch.special.entr(w_BHTS).sum(-1), w_BHTS.gather(-1, first_BHT1).squeeze(-1)
    later_BT = documents.position_BT > 0
    entropy_H, sink_H = (of_BHT.movedim(1, -1)[later_BT].mean(0) for of_BHT in both)
    return entropy_H, sink_H
