"""Parts for tests only, one YAML each in tests/probe_configs/part."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gptattn.attention.cache import TokenCache
from gptattn.attention.parts.base import Entry, Part


class Shift(Part):
    """Adds a learned number per head to the mix."""

    refuses: Mapping[str, str] = {
        "probe_stretch": "both act on the mix",
        "none": "it needs positions",
    }

    def __init__(self, num_heads: int, start: float) -> None:
        super().__init__()
        if not -1 <= start <= 1:
            raise ValueError(f"start={start} must lie in [-1, 1]; 0.0 changes nothing at first")
        self.start = start
        self.shift_H11 = nn.Parameter(torch.empty(num_heads, 1, 1))

    def initialise(self, std: float) -> None:
        self.shift_H11.fill_(self.start)

    def mix(self, y_BHTD: Tensor, x_BTE: Tensor) -> Tensor:
        return y_BHTD + self.shift_H11


class Stretch(Part):
    """Multiplies the merged output by a number that each token's cache entry repeats."""

    def kept(self) -> dict[str, Entry]:
        return {"ones": Entry(heads=1, size=1)}

    def entries(self, x_BTE: Tensor, cache: TokenCache | None) -> dict[str, Tensor]:
        return {"ones": x_BTE.new_ones(x_BTE.shape[0], 1, x_BTE.shape[1], 1)}

    def output(self, y_BTE: Tensor, x_BTE: Tensor) -> Tensor:
        return 2.0 * y_BTE
