"""Queries and keys normalised per head."""

import torch
from torch import Tensor, nn

from gptattn.attention.base import Shared
from gptattn.attention.parts.base import Part
from gptattn.attention.softmax import wide_rms_norm


class QKNorm(Part):
    """RMSNorm of each query and each key over its D numbers, before positions; the scale stays.

    q becomes gain_D * q / sqrt(mean(q^2) + eps), and so does k with a gain of its own. All heads
    share the two gains: 2 * D parameters; a layer without keys of its own (num_kv_heads=0) has the
    first alone. Raises ValueError for an eps that is not positive.

    Source: Dehghani et al. 2023, arXiv:2302.05442, sec. 2 (with LayerNorm); per head with RMSNorm
    as in Qwen3, arXiv:2505.09388, sec. 2.
    """

    def __init__(self, head_dim: int, eps: float = 1e-6, num_kv_heads: int = 1) -> None:
        super().__init__()
        if not 0 < eps < float("inf"):
            raise ValueError(f"eps={eps} must be a small positive number, such as 1e-6")
        self.eps = eps
        self.q_gain_D = nn.Parameter(torch.ones(head_dim))
        self.k_gain_D = nn.Parameter(torch.ones(head_dim)) if num_kv_heads else None

    def heads(
        self, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, shared: Shared
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self.k_gain_D is not None:
            k_BGTD = wide_rms_norm(k_BGTD, self.k_gain_D, self.eps)
        return wide_rms_norm(q_BHTD, self.q_gain_D, self.eps), k_BGTD, v_BGTD
