"""A cache with one entry per token that keeps its numbers in fewer bits.

A format packs x [..., size] into named tensors [..., n], token by token, and unpacks an
approximation of x.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from gptattn.attention.cache import Entry, TokenCache
from gptattn.position.base import Positions

GROUP = 32  # numbers along the head that share the scale and zero point of `Int4`
MIN_SIZE = 8  # fewer numbers per token and head are not worth a scale
HALF_MAX = torch.finfo(torch.float16).max


class BFloat16:
    """Numbers in bfloat16, as most decoders keep them: 2 bytes each."""

    def pack(self, x: Tensor) -> dict[str, Tensor]:
        return {"numbers": x.to(torch.bfloat16)}

    def unpack(self, parts: Mapping[str, Tensor], size: int, dtype: torch.dtype) -> Tensor:
        return parts["numbers"].to(dtype)


class Int8:
    """Symmetric: x = code * scale, codes from -127 to 127, one scale per token and head.

    scale = max |x| / 127, stored in float16; codes are computed with the stored scale. If all of a
    head's numbers are below 1e-3, the scale loses bits too; below 4e-6 the scale and the numbers
    become 0. A head of D numbers takes D + 2 bytes.
    """

    def pack(self, x: Tensor) -> dict[str, Tensor]:
        x = _wide(x)
        scale = _half(x.abs().amax(-1, keepdim=True) / 127)
        codes = _rounded(x, scale.to(x.dtype)).clamp(-127, 127)
        return {"codes": codes.to(torch.int8), "scale": scale}

    def unpack(self, parts: Mapping[str, Tensor], size: int, dtype: torch.dtype) -> Tensor:
        return (parts["codes"] * parts["scale"].float()).to(dtype)


class Int4:
    """With a zero point: x = zero + code * scale, codes from 0 to 15, in groups of 32 numbers.

    zero = min x and scale = (max x - min x) / 15 per group along the head, both stored in float16.
    Codes are computed with the stored numbers, two to a byte. A head's last group can be shorter. A
    head of 64 numbers takes 32 + 2 * 4 bytes.

    Source: Liu et al. 2024 (KIVI), arXiv:2402.02750, which groups keys along the tokens instead;
    along the head, no token waits for others.
    """

    def pack(self, x: Tensor) -> dict[str, Tensor]:
        x = _wide(x)
        groups = x.split(GROUP, dim=-1)
        low = torch.cat([group.amin(-1, keepdim=True) for group in groups], -1)
        high = torch.cat([group.amax(-1, keepdim=True) for group in groups], -1)
        zero, scale = _half(low), _half((high - low) / 15)
        size = x.shape[-1]
        above = x - _spread(zero, size, x.dtype)
        codes = _rounded(above, _spread(scale, size, x.dtype)).clamp(0, 15).to(torch.uint8)
        codes = F.pad(codes, (0, size % 2))
        # Neighbours share a byte, the first in its lower half.
        return {"codes": codes[..., ::2] | codes[..., 1::2] << 4, "scale": scale, "zero": zero}

    def unpack(self, parts: Mapping[str, Tensor], size: int, dtype: torch.dtype) -> Tensor:
        pairs = parts["codes"]
        codes = torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(-2)[..., :size]
        scale, zero = (_spread(parts[name], size, torch.float32) for name in ("scale", "zero"))
        return (zero + codes * scale).to(dtype)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _half(x: Tensor) -> Tensor:
    return x.clamp(-HALF_MAX, HALF_MAX).to(torch.float16)


def _rounded(x: Tensor, scale: Tensor) -> Tensor:
    """Return x / scale to the nearest whole number; 0 where all numbers are the same."""
    return torch.where(scale > 0, x / scale, 0.0).round()


def _spread(of_group: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Repeat each group's number for each of its members: [..., size]."""
    return of_group.to(dtype).repeat_interleave(GROUP, dim=-1)[..., :size]


Format = BFloat16 | Int8 | Int4


class QuantisedCache(TokenCache):
    """A `TokenCache` that holds packed tensors: `k/codes`, `k/scale` and so on.

    Every entry is read back from its packed form, even a token's own. `wide` entries, such as a
    running sum, and entries with fewer than `MIN_SIZE` numbers per head stay as they are. `like` is
    an empty, unpacked cache of the same size, with the entries `kept`; `sizes` names those packed.
    """

    def __init__(self, like: TokenCache, kept: Mapping[str, Entry], form: Format) -> None:
        self.form = form
        self.dtypes = {name: x.dtype for name, x in like.tensors.items()}
        self.sizes = {n: e.size for n, e in kept.items() if not e.wide and e.size >= MIN_SIZE}
        super().__init__(self._pack(like.tensors), like.window)

    def write(
        self, new: Mapping[str, Tensor], positions: Positions | None = None
    ) -> tuple[dict[str, Tensor], Positions]:
        held, k_pos = super().write(self._pack(new), positions)
        return {name: self._unpack(name, held) for name in new}, k_pos

    def _pack(self, entries: Mapping[str, Tensor]) -> dict[str, Tensor]:
        packed: dict[str, Tensor] = {}
        for name, x in entries.items():
            if name in self.sizes:
                packed |= {f"{name}/{part}": y for part, y in self.form.pack(x).items()}
            else:
                packed[name] = x
        return packed

    def _unpack(self, name: str, held: Mapping[str, Tensor]) -> Tensor:
        if name not in self.sizes:
            return held[name]
        prefix = f"{name}/"
        parts = {k.removeprefix(prefix): x for k, x in held.items() if k.startswith(prefix)}
        return self.form.unpack(parts, self.sizes[name], self.dtypes[name])
