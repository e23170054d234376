"""Queries and keys normalised, per head or over the width."""

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from gptattn.attention.base import Shared
from gptattn.attention.parts.base import Part
from gptattn.attention.softmax import split_heads, wide_rms_norm

Over = Literal["head", "width"]


class QKNorm(Part):
    """RMSNorm of each query and each key over its D numbers, before positions; the scale stays.

    q becomes gain_D * q / sqrt(mean(q^2) + eps), and so does k with a gain of its own. All heads
    share the two gains: 2 * D parameters; a layer without keys of its own (num_kv_heads=0) has the
    first alone. over=width takes the mean over all heads together, as OLMo 2 does: (H + G) * D
    parameters. Raises ValueError for an eps that is not positive.

    Source: Dehghani et al. 2023, arXiv:2302.05442, sec. 2 (with LayerNorm); per head with RMSNorm
    as in Qwen3, arXiv:2505.09388, sec. 2; over the width: OLMo 2, arXiv:2501.00656, sec. 3.3.
    """

    def __init__(
        self,
        head_dim: int,
        eps: float = 1e-6,
        over: Over = "head",
        num_heads: int = 1,
        num_kv_heads: int = 1,
    ) -> None:
        super().__init__()
        if not 0 < eps < float("inf"):
            raise ValueError(f"eps={eps} must be a small positive number, such as 1e-6")
        if over not in get_args(Over):
            raise ValueError(f"over={over} is unknown; give {' or '.join(get_args(Over))}")
        self.eps = eps
        wide = over == "width"
        q_size, k_size = (head_dim * (n if wide else 1) for n in (num_heads, num_kv_heads))
        self.q_gain_D = nn.Parameter(torch.ones(q_size))
        self.k_gain_D = nn.Parameter(torch.ones(k_size)) if num_kv_heads else None

    def heads(
        self, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, shared: Shared
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self.k_gain_D is not None:
            k_BGTD = self._norm(k_BGTD, self.k_gain_D)
        return self._norm(q_BHTD, self.q_gain_D), k_BGTD, v_BGTD

    def _norm(self, x_BHTD: Tensor, gain: Tensor) -> Tensor:
        if len(gain) == x_BHTD.shape[-1]:
            return wide_rms_norm(x_BHTD, gain, self.eps)
        merged_BTX = x_BHTD.transpose(1, 2).flatten(2)
        return split_heads(wide_rms_norm(merged_BTX, gain, self.eps), x_BHTD.shape[1])
