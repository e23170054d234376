"""Queries and keys normalised, per head or over the width."""

from typing import Annotated, Literal

import torch
from msgspec import Meta
from torch import Tensor, nn

from gptattn.attention.base import Shared
from gptattn.attention.parts.base import Part
from gptattn.attention.softmax import split_heads, wide_rms_norm

Over = Literal["head", "width"]
After = Literal["projection", "rotation"]


class QKNorm(Part):
    """RMSNorm of each query and key over its D numbers, before positions; the score scale stays.

    q becomes gain_D * q / sqrt(mean(q^2) + eps), and k likewise, with its own gain. All heads share
    the two gains: 2 * D parameters; a layer that projects no keys (num_kv_heads=0) has only the
    first. over=width takes the mean over all heads together, as in OLMo 2: (H + G) * D parameters.
    gain=False leaves the gains out, as in Llama 4. after=rotation normalises after positions have
    acted: with rotary positions, the gains then act on rotated numbers.

    Source: Dehghani et al. 2023, arXiv:2302.05442, sec. 2 (with LayerNorm); per head with RMSNorm
    as in Qwen3, arXiv:2505.09388, sec. 2; over the width: OLMo 2, arXiv:2501.00656, sec. 3.3;
    after the rotation as in Hunyuan's dense models (tencent/Hunyuan-7B-Instruct, 2025).
    """

    q_gain_D: Tensor
    k_gain_D: Tensor | None

    def __init__(
        self,
        head_dim: int,
        eps: Annotated[float, Meta(gt=0)] = 1e-6,
        over: Over = "head",
        gain: bool = True,
        num_heads: int = 1,
        num_kv_heads: int = 1,
        after: After = "projection",
    ) -> None:
        super().__init__()
        self.eps, self.after_rotation = eps, after == "rotation"
        wide = over == "width"
        if wide and self.after_rotation:
            raise ValueError("over=width works only before the rotation; use after=projection")
        q_size, k_size = (head_dim * (n if wide else min(1, n)) for n in (num_heads, num_kv_heads))
        for name, size in (("q_gain_D", q_size), ("k_gain_D", k_size)):
            if gain:
                self.register_parameter(name, nn.Parameter(torch.ones(size)) if size else None)
            else:
                self.register_buffer(name, torch.ones(size) if size else None, persistent=False)

    def heads(
        self, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, shared: Shared
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self.after_rotation:
            return q_BHTD, k_BGTD, v_BGTD
        return *self._both(q_BHTD, k_BGTD), v_BGTD

    def rotated(self, q_BHTD: Tensor, k_BGTD: Tensor) -> tuple[Tensor, Tensor]:
        return self._both(q_BHTD, k_BGTD) if self.after_rotation else (q_BHTD, k_BGTD)

    def _both(self, q_BHTD: Tensor, k_BGTD: Tensor) -> tuple[Tensor, Tensor]:
        if self.k_gain_D is not None:
            k_BGTD = self._norm(k_BGTD, self.k_gain_D)
        return self._norm(q_BHTD, self.q_gain_D), k_BGTD

    def _norm(self, x_BHTD: Tensor, gain: Tensor) -> Tensor:
        if len(gain) == x_BHTD.shape[-1]:
            return wide_rms_norm(x_BHTD, gain, self.eps)
        merged_BTX = x_BHTD.transpose(1, 2).flatten(2)
        return split_heads(wide_rms_norm(merged_BTX, gain, self.eps), x_BHTD.shape[1])
