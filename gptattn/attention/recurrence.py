"""The two recurrences of linear attention: token by token, and in chunks for training.

A state S [D, V] per head replaces keys and values. Every token decays it, writes to it and reads:

    decayed linear attention    S = exp(g) S;    S = S + k v^T;                     o = S^T q
    the gated delta rule        S = exp(g) S;    S = S + beta k (v - k^T S)^T;      o = S^T q

The log decay g <= 0 is one number per head, g [B, H, T], or one per channel of the key,
g [B, H, T, D], which decays the rows of S. `step` is the definition, for one token. The chunked
forms compute the same for all tokens of a row by products within chunks, and only the states
between chunks one after the other. In rows of several documents each begins with a state of zero:
`start_BT` is where in its row each token's document begins.

Letters beside the usual ones: V value size of a head, N chunks, C tokens of a chunk. No exponent
is above zero anywhere, so nothing overflows, however strong the decay.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def step(
    q_BHD: Tensor,
    k_BHD: Tensor,
    v_BHV: Tensor,
    g: Tensor,
    beta_BH: Tensor | None,
    s_BHDV: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the output [B, H, V] of one token, and the state after it.

    g is [B, H] or [B, H, D]. Without beta it is decayed linear attention, else the delta rule.

    Source: Yang et al. 2024, arXiv:2412.06464, eq. 10; per channel: Kimi Team 2025,
    arXiv:2510.26692, sec. 3; without beta: Yang et al. 2023, arXiv:2312.06635, sec. 4.1.
    """
    decay = g.exp()[..., None] if g.ndim == q_BHD.ndim else g.exp()[..., None, None]
    s_BHDV = decay * s_BHDV
    write_BHV = v_BHV
    if beta_BH is not None:
        error_BHV = v_BHV - (k_BHD[..., None, :] @ s_BHDV).squeeze(-2)
        write_BHV = beta_BH[..., None] * error_BHV
    s_BHDV = s_BHDV + k_BHD[..., None] * write_BHV[..., None, :]
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

    With g per head, H / G heads may share queries and keys, and g may be [1, H, T]; per channel,
    G = H. Without a state it starts at zero.

    Source: Dao and Gu 2024, arXiv:2405.21060, sec. 6; per channel: Yang et al. 2023,
    arXiv:2312.06635, sec. 4.2.
    """
    T, G = q_BGTD.shape[2], q_BGTD.shape[1]
    R, V = v_BHTV.shape[1] // G, v_BHTV.shape[3]
    # Contiguous, or each product would copy its factors again.
    inputs = (x.contiguous() for x in (q_BGTD, k_BGTD, v_BHTV))
    q, k, v, g = split_chunks(chunk, *inputs, g)
    starts = split_starts(start_BT, q.shape[3])
    # Heads that share a key lie side by side in the columns of v and of the state.
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
    beta_BHT: Tensor,
    s_BHDV: Tensor | None,
    chunk: int,
    start_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gated delta rule's outputs [B, H, T, V] and the last state.

    Without a state it starts at zero. Within a chunk the steps u solve a triangular system, because
    each depends on the ones before it: (1 + A) u = beta (v - exp(b) S^T k), where b are the sums of
    g since the chunk's start and A = beta k k^T exp(b_i - b_j) below the diagonal.

    Source: Yang et al. 2024, arXiv:2412.06464, sec. 3.3; the system: Yang et al. 2024,
    arXiv:2406.06484, sec. 3.2; per channel: Kimi Team 2025, arXiv:2510.26692, sec. 3.
    """
    T, V = v_BHTV.shape[2:]
    q, k, v, g, beta = split_chunks(chunk, q_BHTD, k_BHTD, v_BHTV, g, beta_BHT)
    starts = split_starts(start_BT, q.shape[3])
    if g.ndim == q.ndim:
        (weight, a), since_start, to_last = decay_channels((q, k), k, g, starts)
        a = beta[..., None] * a
    else:
        decay, since_start, to_last = decay_heads(g, q.dtype, starts)
        a = beta[..., None] * decay * (k @ k.mT)
        weight = decay * (q @ k.mT)
    to_end = to_last * k
    # u = u_v - u_k S for a state S that is not known yet; this holds for everything linear in u, so
    # only the states are left to the loop.
    right = beta[..., None] * torch.cat([v, since_start * k], -1)
    u = torch.linalg.solve_triangular(a, right, upper=False, unitriangular=True)  # ignores a's rest
    o_v, o_k = (weight @ u).split([V, q.shape[-1]], -1)
    gain_v, gain_k = (to_end.mT @ u).split([V, q.shape[-1]], -1)
    keep = since_start[..., -1:, :] * torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)
    s_BHDV = torch.zeros_like(gain_v[:, :, 0]) if s_BHDV is None else s_BHDV
    before, s = [], s_BHDV.flatten(0, 1)  # the state before each chunk
    for keep_chunk, gain_chunk in zip(
        (keep - gain_k).flatten(0, 1).unbind(1), gain_v.flatten(0, 1).unbind(1), strict=True
    ):
        before.append(s)
        s = torch.baddbmm(gain_chunk, keep_chunk, s)
    s_BHNDV = torch.stack(before, 1).unflatten(0, s_BHDV.shape[:2])
    o = o_v + (since_start * q - o_k) @ s_BHNDV
    return o.flatten(2, 3)[:, :, :T], s.view_as(s_BHDV)


def chunk_sizes(tokens: int, chunk: int) -> tuple[int, int]:
    """Return the number of chunks N and their tokens C: equal chunks need the least padding."""
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

    The first is exp(b_i - b_j) [..., C, C], 0 for j > i; the others are [..., C, 1]. `starts`:
    nothing passes from one document to the next.
    """
    C = g.shape[-1]
    # In float64: a small difference of two large sums, as after a strong decay, loses digits.
    b = g.double().cumsum(-1)
    later = torch.ones(C, C, dtype=torch.bool, device=g.device).triu(1)
    # Masked before exp: the exponents above the diagonal are positive and may overflow.
    exponent = (b[..., :, None] - b[..., None, :]).to(dtype).masked_fill(later, -torch.inf)
    decay, since_start = exponent.exp(), b.to(dtype).exp()[..., None]
    to_last = (b[..., -1:] - b).to(dtype).exp()[..., None]
    if starts is not None:
        same, before = _compare_documents(starts)
        decay = decay * same
        since_start = since_start * before[..., None]
        to_last = to_last * same[..., -1:]
    return decay, since_start, to_last


def decay_channels(
    rows: tuple[Tensor, ...], k: Tensor, g: Tensor, starts: Tensor | None
) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """Return scores with the keys, and decays since the chunk's start and to its end, per channel.

    x, k and g are [..., N, C, D]. The scores of each x in `rows` are sum over d of
    x_id k_jd exp(b_id - b_jd) [..., C, C], 0 for j > i; the decays are [..., C, D].

    Factors exp(b_i) and exp(-b_j) would overflow, and one exponential for each i, j and d is C
    times the work. So blocks of 1, 2, 4, ... tokens are joined in pairs: a token of the second and
    one of the first meet at the border, as exp(b_i - b_border) exp(b_border - b_j), both at most 1.

    Source: secondary chunking, Yang et al. 2023, arXiv:2312.06635, sec. 4.3, in log2 C levels.
    """
    C, kinds = k.shape[-2], len(rows)
    more = (1 << (C - 1).bit_length()) - C
    *filled, k, since = (F.pad(x, (0, 0, 0, more)) for x in (*rows, k, g))
    # Of the blocks: decay since before its first token, and to its last, [..., blocks, size, D].
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
    since, to_last = since[..., 0, :C, :], to_last[..., 0, :C, :]
    if starts is not None:
        same, before = _compare_documents(starts)
        scores = tuple(x * same for x in scores)
        since = since * before[..., None]
        to_last = to_last * same[..., -1:]
    return scores, since, to_last


def _compare_documents(starts: Tensor) -> tuple[Tensor, Tensor]:
    """Return whether two tokens share a document, and whether it began before the chunk."""
    N, C = starts.shape[-2:]
    first_N1 = C * torch.arange(N, device=starts.device)[:, None]  # token of each chunk
    return starts[..., :, None] == starts[..., None, :], starts < first_N1


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
) -> int:
    """Return the FLOPs of a row in a chunked form: its products and, of the delta rule, its solve.

    Queries and keys have G heads, or H. `channels`: g is per channel.
    """
    N, C = chunk_sizes(tokens, chunk)
    pairs = C * C
    if channels:
        P = 1 << (C - 1).bit_length()
        pairs = P * (P - 1) // 2 + P  # in the joined blocks, and of each token with itself
    scores = 2 * pairs * D
    if not delta:
        within = 2 * C * C * V + 2 * C * D * V  # what v gives to outputs and to the state
        return N * ((G or H) * scores + H * (within + 2 * C * D * V))
    width = V + D  # columns of u
    solve = C * (C - 1) * width
    within = 2 * C * C * width + 2 * C * D * width  # what u gives to outputs and to the state
    carried = 2 * D * D * V + 2 * C * D * V
    return H * N * (2 * scores + solve + within + carried)
