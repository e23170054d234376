"""Normalisation inside an attention."""

import torch
import torch.nn.functional as F
from torch import Tensor


def wide_rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Return gain * x / sqrt(mean(x^2) + eps) over the last axis, in the type of x.

    Computed in float32 or wider: a mean of squares has too few digits in 16 bits.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467, sec. 3.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(wide), gain.shape, gain.to(wide), eps).to(x.dtype)
