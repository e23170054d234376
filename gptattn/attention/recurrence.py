"""Mechanisms that keep a state: their recurrence, its chunked form, and their shared code.

A state S [D, V] per head replaces keys and values. Each token decays it, writes to it and reads it:

    decayed linear attention    S = exp(g) S;    S = S + k v^T;                     o = S^T q
    the gated delta rule        S = exp(g) S;    S = S + beta k (v - S^T k)^T;      o = S^T q
    diagonal plus low rank      S = exp(g) S + c (S^T a)^T + k v^T;                 o = S^T q

The last form removes with separate keys: `a` reads S before the decay, and the result is written at
c. The log decay g <= 0 is one number per head, g [B, H, T], or one per key channel,
g [B, H, T, D], which decays the rows of S. `step` is the definition, for one token. The chunked
forms compute the same for all tokens of a row: products within chunks, and a loop only over the
states between chunks. If a row holds several documents, each starts from a zero state; `start_BT`
is where each token's document begins in its row. A token can write several times, each time with
its own k, v and beta; the chunked forms treat each write as a token.

Letters besides the usual ones: V value size of a head, N chunks, C tokens of a chunk or channels of
a convolution, P writes of all tokens. No exponent is ever above zero, so even a strong decay
doesn't overflow.
"""

import math
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from msgspec import Meta
from torch import Tensor, nn

from gptattn.attention.base import Attention, Shared, check_sizes
from gptattn.attention.cache import Cache
from gptattn.attention.convolution import ShortConvolution
from gptattn.attention.core import is_gpu
from gptattn.machine.device import Toolchain
from gptattn.position.base import Documents, Positions

Backend = Literal["auto", "chunked", "fla"]
FLA_CHUNK = 64  # tokens, in all of fla's kernels
FlaKernel = Callable[..., tuple[Tensor, Tensor]]
# Arguments of several mechanisms.
Chunk = Annotated[int, Meta(ge=1)]
ConvSize = Annotated[int, Meta(ge=0)] | None
Eps = Annotated[float, Meta(gt=0)]


class RecurrentAttention(Attention):
    """Attention with a state of constant size per head; subclasses say what to write and read.

    x [B, T, d_in] -> y [B, T, d_out]. It needs no position and has no dropout. One token runs
    `step`; several run in chunks of at most `chunk` tokens, which hide nothing from each other.
    `norm_eps` is added to the mean square in the outputs' norm. backend=fla: on a GPU, several
    tokens run in fla's kernels, in chunks of FLA_CHUNK. Raises ValueError for impossible sizes, and
    for backend=fla without a GPU or the package.
    """

    knows_order: ClassVar[bool] = True
    keeps_documents: ClassVar[bool] = True
    plain_backend: ClassVar[str] = "chunked"
    delta: ClassVar[bool] = False  # whether it follows the delta rule
    by_channel: ClassVar[bool] = False  # whether each key channel has its own decay
    removes: ClassVar[bool] = False  # whether it removes with separate keys, `a` and `c`
    writes: int = 1  # to the state, per token
    state_sizes: tuple[int, int, int]  # H, D and V of the state; subclasses set it

    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int,
        num_heads: int,
        chunk: int,
        norm_eps: float,
        backend: Backend,
    ) -> None:
        super().__init__()
        check_sizes(d_out, num_heads, num_heads)
        if backend == "fla" and not (torch.cuda.is_available() and find_spec("fla")):
            raise ValueError(
                "backend=fla needs a CUDA device and pip install 'gptattn[fla]'; else use chunked"
            )
        name = ("kda" if self.by_channel else "gated_delta_rule") if self.delta else "simple_gla"
        self.kernel = load_fla(name) if backend == "fla" else None
        self.d_in, self.d_out, self.context_length = d_in, d_out, context_length
        self.num_heads, self.chunk, self.norm_eps = num_heads, chunk, norm_eps
        self.backend: Backend = backend
        self.groups = num_heads  # G heads of queries and keys
        self.conv: ShortConvolution | None = None

    def make_convolution(
        self, channels: int, conv_size: int | None, bias: bool = False
    ) -> ShortConvolution | None:
        """Return a convolution over `conv_size` tokens; None for 0 or None."""
        if conv_size and conv_size > self.context_length:
            raise ValueError(
                f"conv_size={conv_size} is above context_length={self.context_length}; 4 is usual"
            )
        return ShortConvolution(channels, conv_size, bias) if conv_size else None

    def convolve(self, x_BTC: Tensor, cache: Cache | None, positions: Positions) -> Tensor:
        """Return SiLU of the convolved x; of x itself without a convolution."""
        return F.silu(x_BTC if self.conv is None else self.conv(x_BTC, cache, positions))

    def recur(
        self,
        q_BGTD: Tensor,
        k_BGPD: Tensor,
        v_BHPV: Tensor,
        g: Tensor,
        beta_BHP: Tensor | None,
        cache: Cache | None,
        positions: Positions,
        dtype: torch.dtype,
        removal: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Return the outputs [B, H, T, V], and write the last state to the cache.

        One token with a cache runs `step`; otherwise the backend runs. Without beta, H / G heads
        can share queries and keys. P = T * `writes`; a token's writes are side by side. `dtype` is
        the projections' type, in which fla multiplies. `removal`: as in `chunked_delta`. Inputs are
        in float32 or wider, outside autocast: a state that sums thousands of small steps needs more
        digits than 16 bits have.
        """
        s_BHDV = None if cache is None else cache.tensors["state"]
        documents = positions if isinstance(positions, Documents) else None
        if isinstance(positions, Tensor):  # padding neither decays the state nor writes to it
            real = (positions >= 0)[..., None, :, None]
            g = g * (real if g.ndim == q_BGTD.ndim else real[..., 0])
            k_BGPD = k_BGPD * real.repeat_interleave(self.writes, -2)
            removal = removal and (removal[0], removal[1] * real)
        if s_BHDV is not None and q_BGTD.shape[2] == 1:
            q, k = q_BGTD, k_BGPD
            if (R := v_BHPV.shape[1] // q.shape[1]) > 1:
                q, k = q.repeat_interleave(R, 1), k.repeat_interleave(R, 1)
            inputs = q.squeeze(2), k, v_BHPV, g.squeeze(2), beta_BHP, s_BHDV
            y_BHV, new_state = step(*inputs, removal)
            s_BHDV.copy_(new_state)
            return y_BHV.unsqueeze(2)
        q, n = q_BGTD, self.writes
        if n > 1:  # a token decays the state before its first write, and reads it after its last
            q = F.pad(q.unsqueeze(3), (0, 0, n - 1, 0)).flatten(2, 3)
            g = F.pad(g.unsqueeze(3), (0, n - 1)).flatten(2)
            if documents is not None:
                documents = Documents(n * documents.start_BT.repeat_interleave(n, 1))
        if self.kernel is not None and is_gpu(q):  # layer checks run on a CPU
            inputs = q, k_BGPD, v_BHPV, g, beta_BHP, s_BHDV
            y_BHPV, new_state = by_fla(self.kernel, *inputs, documents, dtype)
        else:
            rest = s_BHDV, self.chunk, documents and documents.start_BT
            if beta_BHP is None and removal is None:
                y_BHPV, new_state = chunked_linear(q, k_BGPD, v_BHPV, g, *rest)
            else:
                y_BHPV, new_state = chunked_delta(q, k_BGPD, v_BHPV, g, beta_BHP, *rest, removal)
        if s_BHDV is not None:
            s_BHDV.copy_(new_state)
        return y_BHPV if n == 1 else y_BHPV[:, :, n - 1 :: n]

    def choose_backend(
        self, x_BTE: Tensor, shared: Shared, dtype: torch.dtype, tools: Toolchain
    ) -> tuple[Backend, str]:
        obstacles = {
            tools.missing: bool(tools.missing),
            "fla is not installed; pip install 'gptattn[fla]'": not tools.fla,
            "fla supports heads of up to 256": max(self.state_sizes[1:]) > 256,
            "fla has not been measured in float32": dtype.itemsize > 2,
            "no kernel of fla is used for removal by separate keys": self.removes,
            # Triton miscompiled a gate per head for Hopper, and fla refuses it there (fla#640,
            # fla#983); a gate per channel uses other kernels.
            "on this GPU, fla needs Triton 3.7.1, which comes with torch 2.12.1": (
                tools.capability == (9, 0) and tools.triton < (3, 7, 1) and not self.by_channel
            ),
        }
        why = next((reason for reason, holds in obstacles.items() if holds), "")
        return ("chunked" if why else "fla"), why

    def new_cache(self, batch: int, capacity: int) -> Cache:
        """Return an empty cache: the state, in float32 or wider, and the convolution's inputs."""
        weight = next(self.parameters())
        wide = torch.promote_types(weight.dtype, torch.float32)
        tensors = {"state": weight.new_zeros(batch, *self.state_sizes, dtype=wide)}
        if self.conv is not None:
            tensors["tail"] = weight.new_zeros(batch, self.conv.size - 1, len(self.conv.weight_C1K))
        return Cache(tensors)

    def flops(self, T: int, S: int) -> int:
        H, D, V = self.state_sizes
        if T == 1 < S:
            # `step`: decaying a state takes D V; reading it, each write, each correction and a
            # removal's write take 2 D V.
            return (3 + (4 if self.delta else 2) * self.writes + 2 * self.removes) * H * D * V
        kind = {"delta": self.delta, "channels": self.by_channel, "removes": self.removes}
        chunk = FLA_CHUNK if self.backend == "fla" else self.chunk
        return count_flops(T * self.writes, chunk, H, D, V, G=self.groups, **kind)


def draw_decay_bias(count: int) -> nn.Parameter:
    """Return biases whose softplus is log-uniform from 0.001 to 0.1, so that decays start slow.

    Source: github.com/state-spaces/mamba; Gated DeltaNet and Kimi Linear start the same way.
    """
    step = torch.empty(count).uniform_(math.log(1e-3), math.log(1e-1)).exp()
    return nn.Parameter(step.expm1().log())


def unit_length(x: Tensor) -> Tensor:
    """Return x scaled to length 1 along the last axis, or less where x is near zero."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def scale_size(name: str, expand: float, size: int) -> int:
    """Return size * expand. Raises ValueError if it is not a positive whole number."""
    scaled = round(expand * size) if math.isfinite(expand * size) else 0
    if scaled < 1 or abs(scaled - expand * size) > 1e-6:
        problem = f"{name}={expand} makes heads of size {expand * size:g}"
        raise ValueError(f"{problem}; use {max(scaled, 1) / size} for {max(scaled, 1)}")
    return scaled


def step(
    q_BHD: Tensor,
    k_BHPD: Tensor,
    v_BHPV: Tensor,
    g: Tensor,
    beta_BHP: Tensor | None,
    s_BHDV: Tensor,
    removal: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the output [B, H, V] of one token with P writes, and the state after it.

    g is [B, H] or [B, H, D]. Without beta this is decayed linear attention, with beta the delta
    rule. `removal`, keys a and c [B, H, 1, D], extends decayed linear attention.

    Source: Yang et al. 2024, arXiv:2412.06464, eq. 10; per channel: Kimi Team 2025,
    arXiv:2510.26692, sec. 3; without beta: Yang et al. 2023, arXiv:2312.06635, sec. 4.1; several
    writes: Siems et al. 2025, arXiv:2502.10297; removal: Peng et al. 2025, arXiv:2503.14456.
    """
    decay = g.exp()[..., None] if g.ndim == q_BHD.ndim else g.exp()[..., None, None]
    removed = None if removal is None else removal[1].mT * (removal[0] @ s_BHDV)
    s_BHDV = decay * s_BHDV if removed is None else decay * s_BHDV + removed
    for i in range(k_BHPD.shape[2]):
        k_BH1D, write_BH1V = k_BHPD[:, :, i : i + 1], v_BHPV[:, :, i : i + 1]
        if beta_BHP is not None:
            error_BH1V = write_BH1V - k_BH1D @ s_BHDV
            write_BH1V = beta_BHP[:, :, i : i + 1, None] * error_BH1V
        s_BHDV = s_BHDV + k_BH1D.mT * write_BH1V
    return (q_BHD[..., None, :] @ s_BHDV).squeeze(-2), s_BHDV


def chunked_linear(
    q_BGTD: Tensor,
    k_BGTD: Tensor,
    v_BHTV: Tensor,
    g: Tensor,
    s_BHDV: Tensor | None,
    chunk: int,
    start_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return decayed linear attention's outputs [B, H, T, V] and the last state.

    With g per head, H / G heads can share queries and keys, and g can be [1, H, T]; per channel,
    G = H. Without a state it starts from zero.

    Source: Dao and Gu 2024, arXiv:2405.21060, sec. 6; per channel: Yang et al. 2023,
    arXiv:2312.06635, sec. 4.2.
    """
    T, G = q_BGTD.shape[2], q_BGTD.shape[1]
    R, V = v_BHTV.shape[1] // G, v_BHTV.shape[3]
    # Contiguous: otherwise each product would copy its factors again.
    inputs = (x.contiguous() for x in (q_BGTD, k_BGTD, v_BHTV))
    q, k, v, g = split_chunks(chunk, *inputs, g)
    starts = split_starts(start_BT, q.shape[3])
    # Heads that share a key are side by side in the columns of v and of the state.
    if g.ndim == q.ndim:
        (weight,), since_start, to_last = decay_channels((q,), k, g, starts)
        k, gain_of = to_last * k, v
    else:
        decay, since_start, to_last = decay_heads(g, q.dtype, starts)
        scores = q @ k.mT
        weight = decay * (scores.repeat_interleave(R, 1) if R > 1 else scores)
        gain_of = to_last * v
    gain = k.mT @ _side_by_side(gain_of, G)
    keep = since_start[..., -1:, :].mT  # [..., D or 1, 1]
    keep = _side_by_side(keep.expand(*keep.shape[:-1], V), G) if R > 1 else keep
    shape = v_BHTV.shape[0], v_BHTV.shape[1], q.shape[-1], V
    s_BHDV = v.new_zeros(shape) if s_BHDV is None else s_BHDV
    before, s = [], _side_by_side(s_BHDV[:, :, None], G)[:, :, 0]  # the state before each chunk
    for keep_chunk, gain_chunk in zip(keep.unbind(2), gain.unbind(2), strict=True):
        before.append(s)
        s = torch.addcmul(gain_chunk, keep_chunk, s)
    states = torch.stack(before, 2)
    if g.ndim == q.ndim:
        carried = (since_start * q) @ states
    else:
        carried = since_start * _one_by_one(q @ states, R)
    o = weight @ v + carried
    return o.flatten(2, 3)[:, :, :T], _one_by_one(s[:, :, None], R)[:, :, 0]


def _side_by_side(x: Tensor, G: int) -> Tensor:
    """Return x [B, G * R, N, ., V] as [B, G, N, ., R * V]."""
    if x.shape[1] == G:
        return x
    return x.unflatten(1, (G, -1)).movedim(2, -2).flatten(-2)


def _one_by_one(x: Tensor, R: int) -> Tensor:
    """Return x [B, G, N, ., R * V] as [B, G * R, N, ., V]."""
    return x if R == 1 else x.unflatten(-1, (R, -1)).movedim(-2, 2).flatten(1, 2)


def chunked_delta(
    q_BHTD: Tensor,
    k_BHTD: Tensor,
    v_BHTV: Tensor,
    g: Tensor,
    beta_BHT: Tensor | None,
    s_BHDV: Tensor | None,
    chunk: int,
    start_BT: Tensor | None = None,
    removal: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gated delta rule's outputs [B, H, T, V] and the last state.

    Without a state it starts from zero. Within a chunk, each step u depends on those before it, so
    the steps solve a triangular system: (1 + A) u = beta (v - exp(b) S^T k), where b is the sum of
    g since the chunk's start and A = beta k k^T exp(b_i - b_j) below the diagonal.

    With `removal`, keys a and c [B, H, T, D], in place of beta, and g per channel, it is diagonal
    plus low rank: u is what a reads from the state, and is written at c. (1 - A_c) u = A_k v +
    exp(b') S^T a, where A_x = a x^T exp(b'_i - b_j), and b' is b of the token before.

    Source: Yang et al. 2024, arXiv:2412.06464, sec. 3.3; the system: Yang et al. 2024,
    arXiv:2406.06484, sec. 3.2; per channel: Kimi Team 2025, arXiv:2510.26692, sec. 3.
    """
    B, H, T, V = v_BHTV.shape
    D = q_BHTD.shape[-1]
    # Contiguous: otherwise each product would copy its factors again.
    inputs = (x.contiguous() for x in (q_BHTD, k_BHTD, v_BHTV))
    q, k, v, g = split_chunks(chunk, *inputs, g)
    starts = split_starts(start_BT, q.shape[3])
    gain = y_v = None  # what values add to states and outputs, if u lacks them
    if removal is None:
        assert beta_BHT is not None
        (beta,) = split_chunks(chunk, beta_BHT)
        if g.ndim == q.ndim:
            (weight, a), since_start, to_last = decay_channels((q, k), k, g, starts)
            a = beta[..., None] * a
        else:
            decay, since_start, to_last = decay_heads(g, q.dtype, starts)
            a = beta[..., None] * decay * (k @ k.mT)
            weight = decay * (q @ k.mT)
        right, to_end = beta[..., None] * torch.cat([v, since_start * k], -1), to_last * k
    else:
        reads, writes = split_chunks(chunk, *removal)
        if start_BT is not None:  # the first token of a document reads nothing
            first_BT = start_BT == torch.arange(T, device=start_BT.device)
            reads = reads.masked_fill(split_chunks(chunk, first_BT[:, None, :, None])[0], 0.0)
        # Read as the token before would, before this token's decay: no exponent is above zero.
        rows, keys = (q, F.pad(reads[..., 1:, :], (0, 0, 0, 1))), torch.stack([k, writes])
        ((w_v, weight), a_pair), since_start, to_last = decay_channels(rows, keys, g, starts)
        a_v, a = F.pad(a_pair[..., :-1, :], (0, 0, 1, 0))
        since_before = F.pad(since_start[..., :-1, :], (0, 0, 1, 0), value=1.0)
        a, right = -a, torch.cat([a_v @ v, -since_before * reads], -1)
        y_v, gain, to_end = w_v @ v, (to_last * k).mT @ v, to_last * writes
    # u = u_v - u_k S, for a state S still unknown, so the loop computes only states and u.
    u = torch.linalg.solve_triangular(a, right, upper=False, unitriangular=True)  # ignores a's rest
    keep = since_start[..., -1:, :].mT  # [..., D or 1, 1]
    s = v.new_zeros(B * H, D, V) if s_BHDV is None else s_BHDV.flatten(0, 1)
    of_chunks = (x.flatten(0, 1).unbind(1) for x in (*u.split([V, D], -1), to_end.mT, keep))
    gains = [None] * q.shape[2] if gain is None else gain.flatten(0, 1).unbind(1)
    before, steps = [], []  # the state before each chunk, and its u
    for u_v, u_k, to_end_chunk, keep_chunk, more in zip(*of_chunks, gains, strict=True):
        before.append(s)
        steps.append(torch.baddbmm(u_v, u_k, s, alpha=-1))
        base = keep_chunk * s if more is None else torch.addcmul(more, keep_chunk, s)
        s = torch.baddbmm(base, to_end_chunk, steps[-1])
    states, u = (torch.stack(x, 1).unflatten(0, (B, H)) for x in (before, steps))
    o = (since_start * q) @ states + weight @ u
    o = o if y_v is None else o + y_v
    return o.flatten(2, 3)[:, :, :T], s.unflatten(0, (B, H))


@cache
def load_fla(name: str) -> FlaKernel:
    """Return a kernel of flash-linear-attention that takes `Documents` instead of their bounds.

    Source: github.com/fla-org/flash-linear-attention, fla-core 0.6.0, fla/ops/*/chunk.py.
    """
    try:
        kernel = getattr(import_module(f"fla.ops.{name}"), f"chunk_{name}")
    except (ImportError, AttributeError) as error:
        raise ValueError(f"backend=fla needs fla-core 0.6: {error}; use chunked") from error

    # As fla does it: if torch saw the bounds, each new number of them would need a new graph.
    def run(documents: Documents | None, **inputs: Any) -> tuple[Tensor, Tensor]:
        return kernel(cu_seqlens=documents and documents.bounds, **inputs)

    disable: Any = torch.compiler.disable
    return disable(run)


def by_fla(
    kernel: FlaKernel,
    q_BGTD: Tensor,
    k_BGTD: Tensor,
    v_BHTV: Tensor,
    g: Tensor,
    beta_BHT: Tensor | None,
    s_BHDV: Tensor | None,
    documents: Documents | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return what the chunked forms return, from a kernel of flash-linear-attention on a GPU.

    Queries, keys and values are passed in `dtype`; decays, beta and states keep their types. With
    documents, the returned state has one row per document.
    """
    B, H, T, V = v_BHTV.shape
    inputs = {"q": q_BGTD.to(dtype), "k": k_BGTD.to(dtype), "v": v_BHTV.to(dtype), "g": g}
    if beta_BHT is None:  # its kernel cannot share keys
        for x in ("q", "k"):
            inputs[x] = inputs[x].repeat_interleave(H // q_BGTD.shape[1], 1)
        inputs["g"] = g.expand(B, -1, -1)
    else:
        inputs["beta"] = beta_BHT
    inputs = {key: x.transpose(1, 2) for key, x in inputs.items()}  # tokens before heads
    if documents is not None:  # one row of all tokens
        inputs = {key: x.flatten(0, 1)[None] for key, x in inputs.items()}
    y, s = kernel(documents, **inputs, scale=1.0, initial_state=s_BHDV, output_final_state=True)
    return y.view(B, T, H, V).transpose(1, 2).to(v_BHTV.dtype), s


def chunk_sizes(tokens: int, chunk: int) -> tuple[int, int]:
    """Return the number of chunks N and of tokens in each, C: equal chunks pad least."""
    N = -(-tokens // chunk)
    return N, -(-tokens // N)


def split_chunks(chunk: int, *inputs: Tensor) -> list[Tensor]:
    """Return each x [B, H, T, ...] as [B, H, N, C, ...], with zeros after the last token."""
    T = inputs[0].shape[2]
    N, C = chunk_sizes(T, chunk)
    more = N * C - T
    filled = (F.pad(x, (0, 0) * (x.ndim - 3) + (0, more)) if more else x for x in inputs)
    return [x.unflatten(2, (N, C)) for x in filled]


def split_starts(start_BT: Tensor | None, C: int) -> Tensor | None:
    """Return where each token's document begins, in chunks [B, 1, N, C].

    The padding of the last chunk belongs to the last document.
    """
    if start_BT is None:
        return None
    more = -start_BT.shape[1] % C
    start_BT = torch.cat([start_BT, start_BT[:, -1:].expand(-1, more)], 1)
    return start_BT.unflatten(1, (-1, C))[:, None]


def decay_heads(
    g: Tensor, dtype: torch.dtype, starts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the decays of g [..., N, C]: between tokens, since the chunk's start, to its end.

    The first is exp(b_i - b_j) [..., C, C], 0 for j > i; the others are [..., C, 1]. `starts` sets
    decays from one document to the next to 0.
    """
    C = g.shape[-1]
    # In float64: a small difference of two large sums, as after a strong decay, loses digits.
    b = g.double().cumsum(-1)
    later = torch.ones(C, C, dtype=torch.bool, device=g.device).triu(1)
    # Masked before exp: the exponents above the diagonal are positive and may overflow.
    exponent = (b[..., :, None] - b[..., None, :]).to(dtype).masked_fill(later, -torch.inf)
    decay, since_start = exponent.exp(), b.to(dtype).exp()[..., None]
    to_last = (b[..., -1:] - b).to(dtype).exp()[..., None]
    between, since_start, to_last = _part_documents((decay,), since_start, to_last, starts)
    return between[0], since_start, to_last


def decay_channels(
    rows: tuple[Tensor, ...], k: Tensor, g: Tensor, starts: Tensor | None
) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """Return scores with the keys, and decays since the chunk's start and to its end, per channel.

    x, k and g are [..., N, C, D]. The scores of each x in `rows` are sum over d of
    x_id k_jd exp(b_id - b_jd) [..., C, C], 0 for j > i; the decays are [..., C, D].

    Factors exp(b_i) and exp(-b_j) would overflow, and one exponential for each i, j and d is C
    times the work. So blocks of 1, 2, 4, ... tokens are joined in pairs, and the decay from a token
    of the first to one of the second splits at the border between the two:
    exp(b_i - b_border) exp(b_border - b_j), both at most 1.

    Source: secondary chunking, Yang et al. 2023, arXiv:2312.06635, sec. 4.3, in log2 C levels.
    """
    C, kinds = k.shape[-2], len(rows)
    more = (1 << (C - 1).bit_length()) - C
    *filled, k, since = (F.pad(x, (0, 0, 0, more)) for x in (*rows, k, g))
    # Per block: decay since before its first token, and to its last, [..., blocks, size, D].
    since = since.exp().unsqueeze(-2)
    to_last = torch.ones_like(since)
    scores = torch.stack([(x * k).sum(-1) for x in filled], -1)[..., None, None]
    size = 1
    while size < C:
        since_1, since_2 = since.unflatten(-3, (-1, 2)).unbind(-3)
        to_last_1, to_last_2 = to_last.unflatten(-3, (-1, 2)).unbind(-3)
        halves = (x.unflatten(-2, (-1, 2, size))[..., 1, :, :] for x in filled)
        left = torch.cat([half * since_2 for half in halves], -2)
        right = k.unflatten(-2, (-1, 2, size))[..., 0, :, :] * to_last_1
        below = (left @ right.mT).unflatten(-2, (kinds, size))
        scores_1, scores_2 = scores.unflatten(-4, (-1, 2)).unbind(-4)
        scores = torch.cat([F.pad(scores_1, (0, size)), torch.cat([below, scores_2], -1)], -2)
        whole_1, whole_2 = since_1[..., -1:, :], since_2[..., -1:, :]
        since = torch.cat([since_1, whole_1 * since_2], -2)
        to_last = torch.cat([to_last_1 * whole_2, to_last_2], -2)
        size *= 2
    scores = scores[..., 0, :, :C, :C].unbind(-3)
    return _part_documents(scores, since[..., 0, :C, :], to_last[..., 0, :C, :], starts)


def _part_documents(
    between: tuple[Tensor, ...], since_start: Tensor, to_last: Tensor, starts: Tensor | None
) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """Return these decays, with 0 from one document to the next."""
    if starts is None:
        return between, since_start, to_last
    N, C = starts.shape[-2:]
    first_N1 = C * torch.arange(N, device=starts.device)[:, None]  # the first token of each chunk
    same = starts[..., :, None] == starts[..., None, :]
    since_start = since_start * (starts < first_N1)[..., None]
    return tuple(x * same for x in between), since_start, to_last * same[..., -1:]


def count_flops(
    tokens: int,
    chunk: int,
    H: int,
    D: int,
    V: int,
    *,
    G: int | None = None,
    delta: bool = False,
    channels: bool = False,
    removes: bool = False,
) -> int:
    """Return a row's FLOPs in a chunked form: products and, for the delta rule, the solve.

    Queries and keys have G heads, by default H. `channels`: g is per channel. `removes`: the delta
    rule with two kinds of keys.
    """
    N, C = chunk_sizes(tokens, chunk)
    pairs = C * C
    if channels:
        P = 1 << (C - 1).bit_length()
        pairs = P * (P - 1) // 2 + P  # in the joined blocks, plus each token with itself
    scores = 2 * pairs * D
    within = 2 * C * C * V + 2 * C * D * V  # from v, or u, to outputs and to the state
    carried = 2 * C * D * V  # from the state to outputs; the same again to u
    if not delta:
        return N * ((G or H) * scores + H * (within + carried))
    solve = C * (C - 1) * (V + D)
    kinds = 1 + removes
    removal = removes * 2 * C * C * V  # from the written values to u
    return H * N * (kinds * (2 * scores + within) + solve + removal + 2 * carried)
