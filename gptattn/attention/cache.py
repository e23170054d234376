"""What a layer keeps between steps, in preallocated tensors that the caller owns.

An attention module writes to the cache and reads from it. The caller advances it once per step, so
that several modules (such as the layers of a model) can share one step.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gptattn.position.base import Positions


class Cache:
    """Named tensors of one layer; `length` counts the tokens that the layer has seen.

    Used directly, it suits a state of constant size, which the layer updates in `tensors`, or a
    layer without state.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)
        self.length = 0

    @property
    def nbytes(self) -> int:
        """The bytes allocated, counted from the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def advance(self, tokens: int) -> None:
        """Add `tokens` to `length`; call it once per step, after every module has written."""
        self.length += tokens


class CacheGroup:
    """The caches of a model's layers, which advance together.

    Prompts of different lengths share a group through left padding: the first `padding_B[b]` ids of
    row b are padding.
    """

    def __init__(self, caches: Sequence[Cache], padding_B: Tensor | None = None) -> None:
        self.caches, self.padding_B = list(caches), padding_B

    def __getitem__(self, index: int) -> Cache:
        return self.caches[index]

    @property
    def length(self) -> int:
        """The number of tokens that every layer has seen, padding included."""
        return self.caches[0].length

    @property
    def nbytes(self) -> int:
        """The bytes allocated for all layers."""
        return sum(cache.nbytes for cache in self.caches)

    def next_positions(self, tokens: int) -> Positions:
        """Return the next positions: a range, or [batch, tokens] with -1 for padding."""
        index = range(self.length, self.length + tokens)
        if self.padding_B is None:
            return index
        index_T = torch.arange(index.start, index.stop, device=self.padding_B.device)
        return (index_T - self.padding_B[:, None]).clamp_min(-1)

    def advance(self, tokens: int) -> None:
        """Advance every layer's cache."""
        for cache in self.caches:
            cache.advance(tokens)
