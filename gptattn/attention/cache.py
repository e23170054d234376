"""What a layer keeps between steps: preallocated, explicit, owned by the caller.

An attention module writes into the cache and reads from it; the caller advances it once a step,
so that several modules (the layers of a model, say) can share one step.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gptattn.position.base import Positions


class Cache:
    """Named tensors of one layer. As it is, it fits a state of constant size, or no state at all:
    the layer changes what is in `tensors`, and `length` counts the tokens that it has seen."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)
        self.length = 0

    @property
    def nbytes(self) -> int:
        """Bytes allocated, counted from the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def advance(self, tokens: int) -> None:
        """Count `tokens` as held: call once per step, after every module has written."""
        self.length += tokens


class CacheGroup:
    """The caches of a model's layers, which advance together.

    Prompts of different lengths share one by padding on the left: of row b the first `padding_B[b]`
    ids hold no token.
    """

    def __init__(self, caches: Sequence[Cache], padding_B: Tensor | None = None) -> None:
        self.caches, self.padding_B = list(caches), padding_B

    def __getitem__(self, index: int) -> Cache:
        return self.caches[index]

    @property
    def length(self) -> int:
        return self.caches[0].length

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self.caches)

    def next_positions(self, tokens: int) -> Positions:
        """The positions of the next tokens: a range, or [batch, tokens] where rows are padded."""
        index = range(self.length, self.length + tokens)
        if self.padding_B is None:
            return index
        index_T = torch.arange(index.start, index.stop, device=self.padding_B.device)
        return (index_T - self.padding_B[:, None]).clamp_min(-1)

    def advance(self, tokens: int) -> None:
        for cache in self.caches:
            cache.advance(tokens)
