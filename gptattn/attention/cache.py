"""Key/value caches: preallocated, explicit, owned by the caller.

An attention module writes into the cache and reads from it; the caller advances it once a step,
so that several modules (the layers of a model, say) can share one step.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor


class Cache(ABC):
    """What decoding needs of a cache, whatever a variant stores in it.

    Prompts of different lengths share a cache by padding on the left: the first `padding_B[b]`
    places of row b hold no token, and nobody looks at them.
    """

    padding_B: Tensor | None = None  # [batch] int64; None: no row is padded

    @property
    def offset(self) -> int | Tensor:
        """The position of the next token: one for all rows, or [batch]."""
        return self.length if self.padding_B is None else self.length - self.padding_B

    @property
    @abstractmethod
    def length(self) -> int:
        """How many tokens the cache holds."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes allocated, counted from the tensors."""

    @abstractmethod
    def advance(self, tokens: int) -> None:
        """Count `tokens` as held: call once per step, after every module has written."""


class KVCache(Cache):
    """Keys and values of one layer: k_BGSD and v_BGSD, each [batch, num_kv_heads, capacity, D]."""

    def __init__(
        self,
        batch: int,
        num_kv_heads: int,
        capacity: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (batch, num_kv_heads, capacity, head_dim)
        # Left as it is found: nobody reads a place that was not written.
        self.k_BGSD = torch.empty(shape, dtype=dtype, device=device)
        self.v_BGSD = torch.empty(shape, dtype=dtype, device=device)
        self._length = 0

    @property
    def length(self) -> int:
        return self._length

    @property
    def capacity(self) -> int:
        return self.k_BGSD.shape[2]

    @property
    def nbytes(self) -> int:
        return self.k_BGSD.nbytes + self.v_BGSD.nbytes

    def extend(self, k_BGTD: Tensor, v_BGTD: Tensor) -> tuple[Tensor, Tensor]:
        """Write T tokens after those held; return views of all keys and values so far.

        Raises ValueError for other sizes, or when the capacity does not suffice.
        """
        B, G, _, D = self.k_BGSD.shape
        fitting = (B, G, k_BGTD.shape[2], D)
        if k_BGTD.shape != fitting or v_BGTD.shape != fitting:
            raise ValueError(
                f"keys {tuple(k_BGTD.shape)} and values {tuple(v_BGTD.shape)} do not fit the "
                f"cache's batch={B}, {G} heads of size {D}"
            )
        start, stop = self._length, self._length + k_BGTD.shape[2]
        if stop > self.capacity:
            raise ValueError(f"{stop} tokens do not fit the cache's capacity={self.capacity}")
        self.k_BGSD.narrow(2, start, stop - start).copy_(k_BGTD)
        self.v_BGSD.narrow(2, start, stop - start).copy_(v_BGTD)
        return self.k_BGSD.narrow(2, 0, stop), self.v_BGSD.narrow(2, 0, stop)

    def advance(self, tokens: int) -> None:
        self._length += tokens


class CacheGroup(Cache):
    """Caches that advance together: the layers of a model."""

    def __init__(self, caches: Sequence[Cache], padding_B: Tensor | None = None) -> None:
        self.caches, self.padding_B = list(caches), padding_B
        for cache in self.caches:
            cache.padding_B = padding_B

    def __getitem__(self, index: int) -> Cache:
        return self.caches[index]

    @property
    def length(self) -> int:
        return self.caches[0].length

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self.caches)

    def advance(self, tokens: int) -> None:
        for cache in self.caches:
            cache.advance(tokens)
