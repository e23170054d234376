"""Any causal `nn.Module` as an attention; this wrapper adds what the module lacks."""

import copy
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from gptattn.attention.base import Attention, Shared
from gptattn.attention.cache import Cache, Entry, TokenCache, new_token_cache


class ForeignAttention(Attention):
    """A causal module from x [B, T, d_in] to y [B, T, d_out] that knows nothing of caches.

    It decodes by running over the whole prefix again. The module can have `initialise(std)`,
    `out_proj` and `flops(T, S)`, like an `Attention`. Without these, its Linear weights are drawn
    as in every attention, its other parameters stay as constructed, and its FLOPs are counted.
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
        # The module knows no padding. Each row's tokens move to its beginning; the entries after
        # them are then in their future.
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
        """Return the FLOPs over S tokens, without the weights of Linear layers.

        torch counts matrix products and convolutions. In attention, the pairs that
        `F.scaled_dot_product_attention(..., is_causal=True)` hides don't count; a mask's do.
        """
        count = getattr(self.module, "flops", None)
        if count is not None:
            return count(T, S)
        linear = sum(m.weight.numel() for m in self.module.modules() if isinstance(m, nn.Linear))
        return self._count_flops(S) - 2 * T * linear

    def _count_flops(self, tokens: int) -> int:
        for device in ("meta", "cpu"):  # some modules need values, which meta tensors lack
            module = copy.deepcopy(self.module).to_empty(device=device)
            like = next(module.parameters(), torch.empty(0))
            x = torch.zeros(1, tokens, self.d_in, dtype=like.dtype, device=device)
            pairs = _CountPairs()
            with FlopCounterMode(display=False) as counter, pairs, torch.no_grad():
                try:
                    module(x)
                    return counter.get_total_flops() + pairs.flops
                except RuntimeError:  # also what a meta tensor raises for its missing values
                    if device == "cpu":
                        raise
        raise AssertionError

    def initialise(self, std: float) -> None:
        initialise = getattr(self.module, "initialise", None)
        if initialise is None:
            super().initialise(std)
        else:
            initialise(std)

    def residual_writer(self) -> nn.Linear | None:
        writer = getattr(self.module, "out_proj", None)
        return writer if isinstance(writer, nn.Linear) else None


class _CountPairs(TorchFunctionMode):
    """Counts attention by the pairs it needs; torch counts all of them, or none on a CPU."""

    flops = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            func = self._attend
        return func(*args, **kwargs or {})

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **others: Any,
    ) -> Tensor:
        T, S = query.shape[-2], key.shape[-2]
        pairs = T * (T + 1) // 2 if is_causal else T * S
        self.flops += 2 * query[..., 0, 0].numel() * pairs * (query.shape[-1] + value.shape[-1])
        return query.new_zeros(*query.shape[:-1], value.shape[-1])
