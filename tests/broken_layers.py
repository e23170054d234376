"""Modules that break the contract of a layer, each in one way, and sound ones by others.

The first group is what `training/contract.py` must refuse; each says in `said` what it must find.
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gptattn.attention import Cache, MultiHeadAttention, Shared


class Mixer(nn.Module):
    """Sound: two projections around a causal mean, to be broken by subclasses."""

    said: ClassVar[str]

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.up, self.out_proj = nn.Linear(d_in, d_out), nn.Linear(d_out, d_out)

    def mix(self, x: Tensor) -> Tensor:
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]

    def forward(self, x: Tensor) -> Tensor:
        return self.out_proj(self.mix(self.up(x)))


class PeeksOneAhead(Mixer):
    said = "output 0 changes with token 1"

    def mix(self, x):
        return super().mix(x) + F.pad(x[:, 1:], (0, 0, 0, 1))


class DetachedMeanOfAll(Mixer):
    said = "causal"

    def mix(self, x):
        return super().mix(x) - x.detach().mean(1, keepdim=True)


class TopKBeforeTheMask(Mixer):
    said = "causal"

    def mix(self, x):
        scores = x @ x.mT / x.shape[2]
        kept = scores >= scores.topk(min(4, x.shape[1]), dim=-1).values[..., -1:]
        mask = torch.ones_like(scores).tril().bool()
        weights = scores.masked_fill(~(kept & mask), -1e9).softmax(-1)
        return weights @ x


class ChunkLeak(Mixer):
    """Bidirectional within chunks of 64 tokens."""

    said = "causal"

    def mix(self, x):
        return torch.cat([one.mean(1, keepdim=True).expand_as(one) for one in x.split(64, 1)], 1)


class AverageLength(Mixer):
    """Depends on the number of later tokens, not on which they are."""

    said = "the output changes with the text's length"

    def mix(self, x):
        return super().mix(x) * x.shape[1] ** 0.5


class BatchNorm(Mixer):
    said = "rows of a batch"

    def mix(self, x):
        return F.batch_norm(super().mix(x).mT, None, None, training=self.training or True).mT


class NumberOfRows(BatchNorm):
    def mix(self, x):
        return Mixer.mix(self, x) / len(x)


class AddsTheFirstRow(BatchNorm):
    def mix(self, x):
        return super(BatchNorm, self).mix(x) + x[:1]


class CarriesItsStateToTheNextRow(BatchNorm):
    def mix(self, x):
        return super(BatchNorm, self).mix(x.flatten(0, 1)[None]).view(x.shape)


class DividesByTheLargest(BatchNorm):
    def mix(self, x):
        return Mixer.mix(self, x) / Mixer.mix(self, x).abs().max()


class QuantisesTheBatch(BatchNorm):
    """To int8, with one scale for all numbers."""

    stops_gradient = True

    def mix(self, x):
        y = super(BatchNorm, self).mix(x)
        step = y.detach().abs().max() / 127
        return y + ((y / step).round() * step - y).detach()


class ClipsTheBatch(BatchNorm):
    """To a norm that only large inputs reach."""

    def mix(self, x):
        y = super(BatchNorm, self).mix(x)
        return y * (y.numel() ** 0.5 / y.norm()).clamp_max(1.0)


class DividesByTheLargestOfItsRow(Mixer):
    said = "is not causal"

    def forward(self, x):
        y = super().forward(x)
        return y / y.abs().amax((1, 2), keepdim=True)


class LouderThanUsual(Mixer):
    """Depends on later tokens that are ten times as large as usual."""

    said = "is not causal"

    def mix(self, x):
        return super().mix(x) + (x.detach().abs().amax((1, 2), keepdim=True) > 10)


class QuieterThanUsual(Mixer):
    said = "is not causal"

    def mix(self, x):
        return super().mix(x) + (x.detach().square().mean(-1).amin(1) < 0.1)[:, None, None]


class RemembersBatches(Mixer):
    said = "state between batches"

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__(d_in, d_out)
        self.register_buffer("mean", torch.zeros(d_out))

    def mix(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
        return super().mix(x) - self.mean


class DropsInEvaluation(Mixer):
    said = "in evaluation"

    def mix(self, x):
        return F.dropout(super().mix(x), 0.5, training=True)


class NaNAtOneToken(Mixer):
    said = "NaN"

    def mix(self, x):
        later = torch.tensor(x.shape[1] - 1.0)
        return super().mix(x) * (later / later)


class WrongShape(Mixer):
    said = "[2, 70, 4, 16]"

    def forward(self, x):
        return super().forward(x).unflatten(-1, (4, 16))


class ReturnsATuple(Mixer):
    said = "tuple"

    def forward(self, x):
        return super().forward(x), None


class HalfPrecision(Mixer):
    said = "torch.float16"

    def forward(self, x):
        return super().forward(x).half()


class InfiniteGradient(Mixer):
    said = "gradient of up."

    def mix(self, x):
        return super().mix(x) + (x - x.detach()).abs().sqrt()


class Double(torch.autograd.Function):
    """Doubles its input, and its gradient four times."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, upstream):
        return 4 * upstream


class WrongBackward(Mixer):
    said = "gradient of up.weight, up.bias, x that"

    def mix(self, x):
        return super().mix(Double.apply(x))


class WrongBackwardInFloat32(WrongBackward):
    def mix(self, x):
        return super().mix(x.float()).to(x.dtype)


class DetachesItsValues(Mixer):
    """In a fused projection, whose weight has a gradient all the same."""

    said = "gradient of fused.weight, fused.bias, x that"

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__(d_in, d_out)
        self.up, self.fused = nn.Identity(), nn.Linear(d_in, 3 * d_out)

    def mix(self, x):
        q, k, v = self.fused(x).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v.detach(), is_causal=True)


class DetachesAGain(Mixer):
    said = "gradient of gain that"

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__(d_in, d_out)
        self.gain = nn.Parameter(torch.ones(d_out))

    def mix(self, x):
        return super().mix(x) * self.gain.detach()


class WrongInBfloat16(Mixer):
    """As a kernel that has an error in one type."""

    def mix(self, x):
        y = super().mix(x)
        return y * 1.2 if x.dtype == torch.bfloat16 else y


class WrongGradientInBfloat16(Mixer):
    def mix(self, x):
        y = super().mix(x)
        return Double.apply(y) / 2 if x.dtype == torch.bfloat16 else y


class ForgetsTheCache(MultiHeadAttention):
    said = "output 1 differs from one full pass"

    def forward(
        self, x_BTE: Tensor, cache: Cache | None = None, shared: Shared | None = None
    ) -> Tensor:
        return super().forward(x_BTE, None, shared)


class CacheOffByOne(MultiHeadAttention):
    said = "cache"

    def remember(self, new, cache, shared):
        held, k_pos = super().remember(new, cache, shared)
        return (held if cache is None else {**held, "v": held["v"].roll(1, -2)}), k_pos


BROKEN: tuple[Any, ...] = (
    *(PeeksOneAhead, DetachedMeanOfAll, TopKBeforeTheMask, ChunkLeak, AverageLength, BatchNorm),
    *(NumberOfRows, AddsTheFirstRow, CarriesItsStateToTheNextRow, DividesByTheLargest),
    *(QuantisesTheBatch, ClipsTheBatch, LouderThanUsual),
    *(DividesByTheLargestOfItsRow, QuieterThanUsual, RemembersBatches, DropsInEvaluation),
    *(NaNAtOneToken, WrongShape, ReturnsATuple, HalfPrecision, InfiniteGradient, WrongBackward),
    *(WrongBackwardInFloat32, DetachesItsValues, DetachesAGain, ForgetsTheCache, CacheOffByOne),
)


class DropsWholeRows(Mixer):
    """Sound: stochastic depth, which rarely shows in two rows."""

    def mix(self, x):
        y = super().mix(x)
        return y * (torch.rand(len(x), 1, 1) > 0.1) / 0.9 if self.training else y


class ComputesAgain(Mixer):
    """Sound: its forward pass is computed again in backward."""

    def mix(self, x):
        mix = super().mix
        return checkpoint(mix, x, use_reentrant=True) if x.requires_grad else mix(x)


class IgnoresDropout(Mixer):
    """Sound, but dropout is taken and never used."""

    def __init__(self, d_in: int, d_out: int, dropout: float = 0.0) -> None:
        super().__init__(d_in, d_out)


class UnusedParameters(Mixer):
    """Sound, but with a layer that no output depends on."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__(d_in, d_out)
        self.spare = nn.Linear(d_in, d_out)


class RoundsStraightThrough(Mixer):
    """Sound: to sixteenths, with the gradient of what it rounds."""

    stops_gradient = True

    def mix(self, x):
        y = super().mix(x)
        return y + ((16 * y).round() / 16 - y).detach()


class WithoutGradient(nn.Module):
    """Sound, but it learns nothing: its layer is not used."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.spare = nn.Linear(d_in, d_out)

    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(1)


class Zeros(WithoutGradient):
    def forward(self, x):
        return torch.zeros_like(x)


class GatedByAScalar(Mixer):
    """Sound: its gate starts at 0, as in ReZero (Bachlechner et al. 2020, arXiv:2003.04887)."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__(d_in, d_out)
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.gate * super().forward(x)


class InFloat32(Mixer):
    """Sound, but it mixes in float32, as kernels do that know no other format."""

    def mix(self, x):
        return super().mix(x.float()).to(x.dtype)


class OfItsOwnSize(nn.Module):
    """Sound in a model of 32 channels only: it takes none of our sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.projection(x)


class TorchAttention(nn.Module):
    """torch's own multi-head attention with a causal mask."""

    def __init__(self, d_in: int, d_out: int, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(d_in, num_heads, dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(
            x.shape[1], device=x.device, dtype=x.dtype
        )
        return self.inner(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]
