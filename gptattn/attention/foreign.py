"""Any causal `nn.Module` as an attention: what it lacks is done for it here."""

import copy
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from gptattn.attention.base import Attention, Shared
from gptattn.attention.cache import Cache, Entry, TokenCache, new_token_cache


class ForeignAttention(Attention):
    """A module that maps x [B, T, d_in] to y [B, T, d_out], causally, and knows nothing of caches.

    It decodes by running over the whole prefix again, and its FLOPs are those that torch counts.
    A module may have `initialise(std)` and `out_proj`, as an `Attention` does; otherwise its Linear
    weights are drawn like those of every attention, and its other parameters stay as constructed.
    """

    decodes_from_cache: ClassVar[bool] = False

    def __init__(self, module: nn.Module, d_in: int, d_out: int, context_length: int) -> None:
        super().__init__()
        self.module = module
        self.d_in, self.d_out, self.context_length = d_in, d_out, context_length

    @property
    def title(self) -> str:
        return type(self.module).__name__

    def forward(
        self, x_BTE: Tensor, cache: Cache | None = None, shared: Shared | None = None
    ) -> Tensor:
        shared = self.begin(x_BTE, cache, shared)
        if cache is None:
            return self.module(x_BTE)
        assert isinstance(cache, TokenCache)
        prefix_BSE = cache.write({"x": x_BTE[:, None]})[0]["x"][:, 0]
        new = slice(prefix_BSE.shape[1] - x_BTE.shape[1], None)
        if not isinstance(shared.positions, Tensor):
            return self.module(prefix_BSE)[:, new]
        # The module knows no padding. Each row's tokens move to its beginning, and what then lies
        # behind them is in their future.
        S = prefix_BSE.shape[1]
        padding_B1 = S - 1 - shared.positions[:, -1:]
        place_BS = torch.arange(S, device=x_BTE.device) + padding_B1
        moved_BSE = prefix_BSE.take_along_dim(place_BS.clamp_max(S - 1)[..., None], 1)
        place_BS = torch.arange(S, device=x_BTE.device) - padding_B1
        return self.module(moved_BSE).take_along_dim(place_BS.clamp_min(0)[..., None], 1)[:, new]

    def new_cache(self, batch: int, capacity: int) -> Cache:
        """Return an empty cache, which keeps the inputs x of the prefix."""
        like = next(self.parameters(), torch.empty(0))
        entries = {"x": Entry(1, self.d_in)}
        return new_token_cache(entries, batch, capacity, like.dtype, like.device)

    def flops(self, T: int, S: int) -> int:
        """Return what torch counts over S tokens, without the weights of Linear layers.

        It counts matrix products, convolutions and attention in full, masked pairs included.
        """
        linear = sum(m.weight.numel() for m in self.module.modules() if isinstance(m, nn.Linear))
        return self._count_flops(S) - 2 * T * linear

    def _count_flops(self, tokens: int) -> int:
        for device in ("meta", "cpu"):  # some modules need values, which meta tensors lack
            module = copy.deepcopy(self.module).to_empty(device=device)
            like = next(module.parameters(), torch.empty(0))
            x = torch.zeros(1, tokens, self.d_in, dtype=like.dtype, device=device)
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                try:
                    module(x)
                    return counter.get_total_flops()
                except RuntimeError:  # also what a meta tensor raises for its missing values
                    if device == "cpu":
                        raise
        raise AssertionError

    def initialise(self, std: float) -> None:
        own = getattr(self.module, "initialise", None)
        if own is None:
            super().initialise(std)
        else:
            own(std)

    def residual_writer(self) -> nn.Linear | None:
        writer = getattr(self.module, "out_proj", None)
        return writer if isinstance(writer, nn.Linear) else None
