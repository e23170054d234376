"""What the mechanisms that keep a state have in common: their convolution, cache and beginnings.

A state [D, V] per head stands where others keep keys and values; `recurrence.py` says how it
changes. Letters beside the usual ones: V value size of a head, C channels of a convolution, K its
size.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptattn.attention.cache import Cache
from gptattn.attention.recurrence import chunked_delta, chunked_linear, step
from gptattn.position.base import Documents, Positions

STEPS = (1e-3, 1e-1)  # between which the softplus of a decay's bias starts
NORM_EPS = 1e-6  # of the length of queries and keys


def recur(
    q_BGTD: Tensor,
    k_BGTD: Tensor,
    v_BHTV: Tensor,
    g: Tensor,
    beta_BHT: Tensor | None,
    cache: Cache | None,
    chunk: int,
    start_BT: Tensor | None,
) -> Tensor:
    """Return the outputs [B, H, T, V], and write the state after them to the cache.

    One token with a cache takes `step`, others a chunked form. H / G heads may share queries and
    keys without beta.
    """
    s_BHDV = None if cache is None else cache.tensors["state"]
    if s_BHDV is not None and v_BHTV.shape[2] == 1:
        R = v_BHTV.shape[1] // q_BGTD.shape[1]
        q, k = q_BGTD.squeeze(2), k_BGTD.squeeze(2)
        if R > 1:
            q, k = q.repeat_interleave(R, 1), k.repeat_interleave(R, 1)
        beta_BH = None if beta_BHT is None else beta_BHT.squeeze(2)
        y_BHV, after = step(q, k, v_BHTV.squeeze(2), g.squeeze(2), beta_BH, s_BHDV)
        y_BHTV = y_BHV.unsqueeze(2)
    elif beta_BHT is None:
        y_BHTV, after = chunked_linear(q_BGTD, k_BGTD, v_BHTV, g, s_BHDV, chunk, start_BT)
    else:
        y_BHTV, after = chunked_delta(q_BGTD, k_BGTD, v_BHTV, g, beta_BHT, s_BHDV, chunk, start_BT)
    if s_BHDV is not None:
        s_BHDV.copy_(after)
    return y_BHTV


def read_positions(positions: Positions) -> tuple[Tensor | None, Tensor | None]:
    """Return where the documents begin [B, T], and which tokens are there [B or 1, T, 1].

    Either is None where it does not matter.
    """
    start_BT = positions.start_BT if isinstance(positions, Documents) else None
    there_BT1 = (positions >= 0).unsqueeze(-1) if isinstance(positions, Tensor) else None
    return start_BT, there_BT1


class ShortConvolution(nn.Module):
    """y[t] = sum over i of weight[i] x[t - size + 1 + i], per channel, plus a bias if it has one.

    Letters: C channels, K = size. All are drawn as torch draws those of a depthwise Conv1d.
    """

    def __init__(self, channels: int, size: int, bias: bool = False) -> None:
        super().__init__()
        self.size, bound = size, size**-0.5
        # With torch's axis of 1, so it is not a matrix.
        self.weight_C1K = nn.Parameter(torch.empty(channels, 1, size).uniform_(-bound, bound))
        self.bias_C = nn.Parameter(torch.empty(channels).uniform_(-bound, bound)) if bias else None

    def forward(
        self, x_BTC: Tensor, tail_BKC: Tensor | None = None, start_BT: Tensor | None = None
    ) -> Tensor:
        """Return y [B, T, C]. The tail holds the size - 1 inputs before x and is advanced by T.

        start_BT: where in its row each token's document begins; it sees no inputs before that.
        """
        T = x_BTC.shape[1]
        if tail_BKC is None:
            seen = F.pad(x_BTC, (0, 0, self.size - 1, 0))
        else:
            seen = torch.cat([tail_BKC.to(x_BTC.dtype), x_BTC], 1)
            tail_BKC.copy_(seen[:, T:])
        y_BTC = torch.zeros_like(x_BTC)
        for i, w_C in enumerate(self.weight_C1K[:, 0].unbind(-1)):
            tap_BTC = w_C * seen[:, i : i + T]
            if start_BT is not None:
                place_T = torch.arange(T, device=x_BTC.device) - (self.size - 1 - i)
                tap_BTC = tap_BTC.masked_fill((place_T < start_BT).unsqueeze(-1), 0.0)
            y_BTC = y_BTC + tap_BTC
        return y_BTC if self.bias_C is None else y_BTC + self.bias_C


def convolve(
    x_BTC: Tensor,
    conv: ShortConvolution | None,
    cache: Cache | None,
    start_BT: Tensor | None,
    there_BT1: Tensor | None,
) -> Tensor:
    """Return SiLU of the convolution of x, or of x itself without one; missing tokens are 0."""
    if there_BT1 is not None:
        x_BTC = x_BTC * there_BT1
    if conv is not None:
        x_BTC = conv(x_BTC, None if cache is None else cache.tensors["tail"], start_BT)
    return F.silu(x_BTC)


def make_convolution(
    channels: int, conv_size: int | None, context_length: int, bias: bool = False
) -> ShortConvolution | None:
    """Return a convolution over `conv_size` tokens, or None for 0 or None.

    Raises ValueError for a size that cannot work.
    """
    conv_size = conv_size or 0
    if conv_size < 0:
        raise ValueError(
            f"conv_size={conv_size} is negative; give the tokens that a convolution sees, "
            "or null for none"
        )
    if conv_size > context_length:
        raise ValueError(f"conv_size={conv_size} is above {context_length=}; 4 is usual")
    return ShortConvolution(channels, conv_size, bias) if conv_size else None


def new_state_cache(
    weight: Tensor, batch: int, H: int, D: int, V: int, conv: ShortConvolution | None
) -> Cache:
    """Return an empty cache: the state, in float32 or wider, and the inputs of the convolution.

    `weight` gives device and type.
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    tensors = {"state": weight.new_zeros(batch, H, D, V, dtype=wide)}
    if conv is not None:
        tensors["tail"] = weight.new_zeros(batch, conv.size - 1, len(conv.weight_C1K))
    return Cache(tensors)


def draw_decay_bias(count: int) -> nn.Parameter:
    """Return biases whose softplus is log-uniform from 0.001 to 0.1: slow decays to begin with.

    Source: github.com/state-spaces/mamba, as Gated DeltaNet and Kimi Linear start too.
    """
    low, high = map(math.log, STEPS)
    step = torch.empty(count).uniform_(low, high).exp()
    return nn.Parameter(step.expm1().log())


def unit_length(x: Tensor) -> Tensor:
    """Return x with length 1 on the last axis, or less where it is near zero."""
    return x * (x.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()


def scale_size(name: str, expand: float, size: int) -> int:
    """Return size * expand. Raises ValueError if it is not a positive whole number."""
    made = round(expand * size) if math.isfinite(expand * size) else 0
    if made < 1 or abs(made - expand * size) > 1e-6:
        said = f"{name}={expand} makes heads of {expand * size:g}"
        raise ValueError(f"{said}; give a multiple of 1/{size} above 0")
    return made


def check_chunk(chunk: int, norm_eps: float) -> None:
    """Raise ValueError for a chunk or an epsilon that cannot work."""
    if chunk < 1:
        raise ValueError(f"chunk={chunk} must be 1 or more tokens; 64 is usual")
    if not 0.0 < norm_eps < math.inf:
        raise ValueError(f"norm_eps={norm_eps} must be a positive number; 1e-5 is usual")
