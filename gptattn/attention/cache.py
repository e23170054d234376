"""What a layer keeps between steps, in preallocated tensors that the caller owns.

An attention writes to its cache and reads from it. The caller advances it once per step, so all
layers of a model take that step together. `TokenCache` has one entry per token (keys and values, or
a latent) and can keep only the first and the newest tokens. `BlockCache` adds entries per block.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gptattn.position.base import Positions


class Cache:
    """Named tensors of one layer; `length` counts the tokens that the layer has seen.

    Use it directly for a layer without state, or with one of constant size, updated in `tensors`.
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

    Prompts of different lengths share a group: row b begins with `padding_B[b]` ids of padding.
    """

    def __init__(self, caches: Sequence[Cache], padding_B: Tensor | None = None) -> None:
        self.caches, self.padding_B = list(caches), padding_B

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


@dataclass(frozen=True)
class Entry:
    """What a cache keeps per token: `heads` rows of `size` numbers; `wide`: in float32 or wider."""

    heads: int
    size: int
    wide: bool = False


class TokenCache(Cache):
    """Named tensors [batch, ..., capacity, size] with one entry per token.

    `window`: keep only the newest tokens, in a ring of `window` slots. A step can bring more tokens
    than that; `write` returns all of them. Positions in a row go up by one per token; entries
    before a row's first token are left padding.

    `sinks`: also keep this many first tokens, next to the ring. Tokens keep their positions in the
    text: rotary keys stay rotated, and ALiBi counts true distances, so the only difference from a
    full cache is the missing keys. The paper renumbers the cached tokens, which streaming beyond
    the trained length needs; within it, that would change distances that the model knows. Once the
    slots are full, `write` takes one token at a time: a longer step would overwrite entries that
    its first tokens still see.

    Source of the sinks: Xiao et al. 2023 (StreamingLLM), arXiv:2309.17453, sec. 3.2.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], window: int | None = None, sinks: int = 0
    ) -> None:
        super().__init__(tensors)
        self.window, self.sinks = window, sinks
        first = next(iter(self.tensors.values()))
        self.capacity, self.device = first.shape[-2], first.device

    def write(
        self, new: Mapping[str, Tensor], positions: Positions | None = None
    ) -> tuple[dict[str, Tensor], Positions]:
        """Append T tokens; `new` maps the tensors' names to the tokens' entries.

        Returns all entries that these tokens can see, by name, and their positions. The entries are
        views of the cache, or a copy if this step overwrites slots of the ring that its first
        tokens still see. Raises ValueError for wrong sizes, for more tokens than the capacity, and
        for a range that doesn't continue from the cached tokens.
        """
        tokens = next(iter(new.values())).shape[-2]
        start, stop = self.length, self.length + tokens
        if isinstance(positions, range) and positions.start != start:
            raise ValueError(f"positions start at {positions.start}, but the next one is {start}")
        if stop > self.capacity and self.capacity != (self.window or 0) + self.sinks:
            raise ValueError(f"{stop} tokens do not fit the cache's capacity={self.capacity}")
        # `index` numbers the tokens that are returned.
        if stop > self.capacity and tokens > 1:
            held, index = self._overwrite(new, start, stop)
        else:
            for name, x in new.items():
                self.tensors[name].narrow(-2, self._slot(start), tokens).copy_(x)
            filled = min(stop, self.capacity)
            held = {name: self.tensors[name].narrow(-2, 0, filled) for name in new}
            index = range(stop) if stop <= self.capacity else self._index(stop)
        if positions is None or isinstance(positions, range):
            return held, index
        assert isinstance(positions, Tensor)  # `Attention.begin` refuses documents
        if isinstance(index, range):
            index = torch.arange(stop, device=positions.device)
        # A row that is all padding so far ends in -1, so all its positions become -1.
        padding_B1 = stop - 1 - positions.reshape(-1, tokens)[:, -1:]
        return held, (index - padding_B1).clamp_min(-1)

    def newest(self, name: str) -> Tensor:
        """Return the last token's entry [batch, ..., 1, size]; the cache must not be empty.

        It is a view: a later step can overwrite it.
        """
        return self.tensors[name].narrow(-2, self._slot(self.length - 1), 1)

    def _overwrite(
        self, new: Mapping[str, Tensor], start: int, stop: int
    ) -> tuple[dict[str, Tensor], range | Tensor]:
        """Write tokens past the ring's end; return the entries that they see, and their numbers."""
        if self.sinks:
            raise ValueError(f"{stop - start} tokens: a full cache with sinks takes one at a time")
        # The first query can see an entry that the last token overwrites: read before writing.
        old = min(start, self.capacity)
        held = {n: torch.cat([self.tensors[n].narrow(-2, 0, old), x], -2) for n, x in new.items()}
        index: range | Tensor = range(stop)
        if start > self.capacity:
            index = torch.cat([self._index(start), torch.arange(start, stop, device=self.device)])
        count = min(stop - start, self.capacity)
        slots = torch.arange(stop - count, stop, device=self.device) % self.capacity
        for name, x in new.items():
            tensor = self.tensors[name]
            tensor.index_copy_(-2, slots, x[..., -count:, :].to(tensor.dtype))
        return held, index

    def _slot(self, token: int) -> int:
        """Return the slot that the token of this number has, or had."""
        if token < self.capacity:
            return token
        return self.sinks + (token - self.sinks) % (self.capacity - self.sinks)

    def _index(self, stop: int) -> Tensor:
        """Return the token number in each slot of a full cache after `stop` tokens."""
        slot, newest = torch.arange(self.capacity, device=self.device), stop - 1
        number = newest - (newest - slot) % (self.capacity - self.sinks)
        return torch.where(slot < self.sinks, slot, number) if self.sinks else number


Compress = Callable[[Mapping[str, Tensor], Tensor, Tensor], Mapping[str, Tensor]]


def count_blocks(tokens: int, block: int, stride: int) -> int:
    """Return how many blocks of `block` tokens, one starting every `stride`, are complete."""
    return max(0, (tokens - block) // stride + 1)


class BlockCache(TokenCache):
    """A `TokenCache` with more tensors, some of them with one entry per block of tokens.

    Block i begins at token i * stride of a row, padding not counted. Its entry is written when its
    last token arrives. Blocks that aren't complete write to the last slot, which is never read.
    Tails are tensors of the last block - 1 tokens, which the next blocks need.
    """

    def write_blocks(
        self, new: Mapping[str, Tensor], positions: Positions, stride: int, compress: Compress
    ) -> Tensor:
        """Append T tokens to the tails named in `new`, and write the blocks that they complete.

        Returns the index of each block's last token in its row, [batch or 1, blocks], -1 until that
        token arrives; there is at least one block. `compress` gets the tails with the new tokens,
        and each last token's index among them, and its position.
        """
        tokens, tail = (of[next(iter(new))].shape[2] for of in (new, self.tensors))
        start, stop = self.length, self.length + tokens
        seen = {name: torch.cat([self.tensors[name], x], 2) for name, x in new.items()}
        for name, x in seen.items():
            self.tensors[name].copy_(x[:, :, tokens:])
        before, after = (count_blocks(n, tail + 1, stride) for n in (start, stop))
        padding_B1 = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        if isinstance(positions, Tensor):
            padding_B1 = stop - 1 - positions.reshape(-1, tokens)[:, -1:]
        if after > before or isinstance(positions, Tensor):
            first_B1 = ((start - padding_B1 - tail - 1) // stride + 1).clamp_min(0)
            number_BN = first_B1 + torch.arange(-(-tokens // stride), device=self.device)
            last_BN = number_BN * stride + tail
            done_BN = last_BN + padding_B1 < stop
            index_BN = (last_BN + padding_B1 - start + tail).where(done_BN, -1)
            for name, x in compress(seen, index_BN, last_BN.where(done_BN, -1)).items():
                slot_BN = number_BN.where(done_BN, self.tensors[name].shape[2] - 1)
                slot_BHNX = slot_BN[:, None, :, None].expand(x.shape)
                self.tensors[name].scatter_(2, slot_BHNX, x.to(self.tensors[name].dtype))
        end_BN = torch.arange(max(1, after), device=self.device) * stride + tail + padding_B1
        return end_BN.where(end_BN < stop, -1)


def new_token_cache(
    entries: Mapping[str, Entry],
    batch: int,
    capacity: int,
    dtype: torch.dtype,
    device: torch.device,
    window: int | None = None,
    sinks: int = 0,
) -> TokenCache:
    """Return an empty cache of these entries per token, each [batch, heads, capacity, size].

    With a window, the capacity is at most window + sinks.
    """
    slots = capacity if window is None else min(capacity, window + sinks)
    wide = torch.promote_types(dtype, torch.float32)
    # Uninitialised: a slot is read only after it is written.
    tensors = {}
    for name, entry in entries.items():
        shape, kind = (batch, entry.heads, slots, entry.size), wide if entry.wide else dtype
        tensors[name] = torch.empty(shape, dtype=kind, device=device)
    return TokenCache(tensors, window, sinks)
