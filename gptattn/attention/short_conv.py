"""A short causal convolution of each channel: a token's channel is mixed with its newest past."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ShortConvolution(nn.Module):
    """y[t] = sum over i of weight[i] x[t - size + 1 + i], per channel, without bias.

    Size 0: y = x. Letters: C channels, K = size. The weights are drawn as torch draws those of a
    depthwise Conv1d. Raises ValueError for a negative size, as `conv_size`.
    """

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        if size < 0:
            raise ValueError(
                f"conv_size={size} is negative; give the tokens that a convolution sees, "
                "or null for none"
            )
        self.size, bound = size, max(1, size) ** -0.5
        # With an axis of 1, as torch's: it is no matrix.
        drawn = torch.empty(channels, 1, size).uniform_(-bound, bound)
        self.weight_C1K = nn.Parameter(drawn) if size else None

    def forward(
        self, x_BTC: Tensor, tail_BKC: Tensor | None = None, start_BT: Tensor | None = None
    ) -> Tensor:
        """Return y [B, T, C]. The tail holds the size - 1 inputs before x and is moved on by T.

        start_BT: where in its row each token's document begins; it sees no inputs before that.
        """
        if self.weight_C1K is None or not x_BTC.shape[1]:
            return x_BTC
        if start_BT is not None:
            return self._in_documents(x_BTC, start_BT)
        if tail_BKC is None:
            seen = F.pad(x_BTC, (0, 0, self.size - 1, 0))
        else:
            seen = torch.cat([tail_BKC.to(x_BTC.dtype), x_BTC], 1)
            tail_BKC.copy_(seen[:, x_BTC.shape[1] :])
        # As an image of one row: for this layout in memory conv1d is slower on the CPU.
        weight = self.weight_C1K[:, None]
        return F.conv2d(seen.mT[:, :, None], weight, groups=len(weight))[:, :, 0].mT

    def _in_documents(self, x_BTC: Tensor, start_BT: Tensor) -> Tensor:
        assert self.weight_C1K is not None
        place_T = torch.arange(x_BTC.shape[1], device=x_BTC.device)
        *earlier, own_C = self.weight_C1K[:, 0].unbind(-1)
        y_BTC = own_C * x_BTC
        for back, w_C in enumerate(reversed(earlier), start=1):
            inside_BT1 = (place_T - back >= start_BT)[:, back:, None]
            # Beyond the row's length there are no tokens so far back, and both are empty.
            more = (w_C * x_BTC[:, :-back]).masked_fill(~inside_BT1, 0.0)
            y_BTC = y_BTC + F.pad(more, (0, 0, min(back, x_BTC.shape[1]), 0))
        return y_BTC

    def new_tail(self, batch: int) -> dict[str, Tensor]:
        """Return `tail` [batch, size - 1, C] before the first token; nothing for size 0."""
        w = self.weight_C1K
        return {} if w is None else {"tail": w.new_zeros(batch, self.size - 1, len(w))}
