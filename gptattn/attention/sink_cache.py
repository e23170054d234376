"""A cache that keeps the first tokens and a window of the newest: attention sinks."""

from collections.abc import Mapping

import torch
from torch import Tensor

from gptattn.attention.token_cache import TokenCache


class SinkCache(TokenCache):
    """The first `sinks` tokens stay; the others lie in a ring of the newest, in the places left.

    Tokens keep the positions that they had in the text: rotary keys are kept rotated, and ALiBi
    counts distances as they are. So nothing but the missing keys differs from a full cache. The
    paper numbers the tokens in the cache anew, which streams beyond the trained length need; within
    it, it would change distances that the model knows. Once the places are full, `write` takes one
    token at a time, because earlier tokens of a longer step would still see what it overwrites.

    `tensors` [batch, ..., capacity, size] as in `TokenCache`. Raises ValueError unless a place for
    the newest token is left beside the sinks, and from `write` for a longer step.

    Source: Xiao et al. 2023 (StreamingLLM), arXiv:2309.17453, sec. 3.2.
    """

    def __init__(self, tensors: Mapping[str, Tensor], sinks: int) -> None:
        capacity = next(iter(tensors.values())).shape[-2]
        if not 0 <= sinks < capacity:
            raise ValueError(f"sinks={sinks} must be 0 to {capacity - 1}, one below the capacity")
        super().__init__(tensors, window=capacity)
        self.sinks = sinks

    def newest(self, name: str) -> Tensor:
        return self.tensors[name].narrow(-2, self._place(self.length - 1), 1)

    def _place(self, token: int) -> int:
        if token < self.capacity:
            return token
        return self.sinks + (token - self.sinks) % (self.capacity - self.sinks)

    def _wrapped(
        self, new: Mapping[str, Tensor], start: int, stop: int
    ) -> tuple[dict[str, Tensor], range | Tensor]:
        if stop - start > 1:
            raise ValueError(f"{stop - start} tokens at once; a full cache with sinks takes one")
        for name, x in new.items():
            self.tensors[name].narrow(-2, self._place(start), 1).copy_(x)
        return dict(self.tensors), self._index(stop)

    def _index(self, stop: int) -> Tensor:
        ring = self.capacity - self.sinks
        place, newest = torch.arange(self.capacity, device=self._device), stop - 1
        age = (newest - place) % ring
        return torch.where(place < self.sinks, place, newest - age)
