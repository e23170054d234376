"""The gated delta rule: a state S [D, V] per head that every token decays, corrects and reads.

    S = exp(g) S;    S = S + beta k (v - k^T S)^T;    o = S^T q

`recurrent` is this definition, one token after the other; `chunked` is the same function for
training. In rows of several documents, each begins with a state of zero: `start_BT` is where in its
row each token's document begins. Letters beside the usual ones: V value size of a head, N chunks, C
tokens of a chunk.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # q, k, v, g, beta of `recurrent`


def advance(
    inputs: Inputs, s_BHDV: Tensor | None, chunk: int, start_BT: Tensor | None = None
) -> Tensor:
    """Return the outputs of any number of tokens; the state, if there is one, is moved on by them.

    Without a state it starts at zero.
    """
    tokens = inputs[0].shape[2]
    if not tokens:
        return inputs[2]
    if s_BHDV is None:
        return chunked(*inputs, None, chunk, start_BT)[0]
    if tokens == 1:
        y_BHTV, after = recurrent(*inputs, s_BHDV, start_BT)
    else:
        y_BHTV, after = chunked(*inputs, s_BHDV, chunk, start_BT)
    s_BHDV.copy_(after)
    return y_BHTV


def recurrent(
    q_BHTD: Tensor,
    k_BHTD: Tensor,
    v_BHTV: Tensor,
    g_BHT: Tensor,
    beta_BHT: Tensor,
    s_BHDV: Tensor,
    start_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the outputs [B, H, T, V] of at least one token, and the state after the last.

    Source: Yang et al. 2024, arXiv:2412.06464, eq. 10.
    """
    read = []
    if start_BT is not None:  # exp(-inf) S is zero
        g_BHT = g_BHT.masked_fill(_begins(start_BT)[:, None], -torch.inf)
    for q_BHD, k_BHD, v_BHV, g_BH, beta_BH in zip(
        *(x.unbind(2) for x in (q_BHTD, k_BHTD, v_BHTV, g_BHT, beta_BHT)), strict=True
    ):
        s_BHDV = g_BH.exp()[..., None, None] * s_BHDV
        error_BHV = v_BHV - (k_BHD[..., None, :] @ s_BHDV).squeeze(-2)
        step_BHV = beta_BH[..., None] * error_BHV
        s_BHDV = s_BHDV + k_BHD[..., None] * step_BHV[..., None, :]
        read.append((q_BHD[..., None, :] @ s_BHDV).squeeze(-2))
    return torch.stack(read, 2), s_BHDV


def chunked(
    q_BHTD: Tensor,
    k_BHTD: Tensor,
    v_BHTV: Tensor,
    g_BHT: Tensor,
    beta_BHT: Tensor,
    s_BHDV: Tensor | None,
    chunk: int,
    start_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return what `recurrent` does, from products over chunks of at most `chunk` tokens.

    Without a state it starts at zero. Within a chunk the steps u solve a triangular system, because
    each depends on the ones before it: (1 + A) u = beta (v - exp(b) S^T k), where b are the sums of
    g since the chunk's start and A = beta k k^T exp(b_i - b_j) below the diagonal. No exponent is
    above zero, so nothing overflows, however strong the decay.

    Source: Yang et al. 2024, arXiv:2412.06464, sec. 3.3; the system: Yang et al. 2024,
    arXiv:2406.06484, sec. 3.2.
    """
    T, V = v_BHTV.shape[2:]
    N = max(1, -(-T // chunk))
    C = -(-T // N)  # equal chunks need the least filling: tokens that change nothing
    filled = (F.pad(x, (0, 0, 0, N * C - T)) for x in (q_BHTD, k_BHTD, v_BHTV))
    q, k, v = (x.unflatten(2, (N, C)) for x in filled)
    g, beta = (F.pad(x, (0, N * C - T)).unflatten(2, (N, C)) for x in (g_BHT, beta_BHT))

    # In float64: a small difference of two large sums, as after a strong decay, loses its digits.
    b = g.double().cumsum(-1)
    later = torch.ones(C, C, dtype=torch.bool, device=q.device).triu(1)
    # Masked before exp: the exponents above the diagonal are positive and may overflow.
    exponent = (b[..., :, None] - b[..., None, :]).to(q.dtype).masked_fill(later, -torch.inf)
    decay, since_start = exponent.exp(), b.to(q.dtype).exp()[..., None]
    to_last = (b[..., -1:] - b).to(q.dtype).exp()[..., None]
    if start_BT is not None:
        among, before, with_last = _in_chunks(start_BT, N, C)
        decay, since_start, to_last = decay * among, since_start * before, to_last * with_last
    a = beta[..., None] * decay * (k @ k.mT)
    weight = decay * (q @ k.mT)
    to_end = to_last * k
    target = beta[..., None] * v
    if N == 1 and s_BHDV is None:
        u = _solve(a, target)
        return (weight @ u)[:, :, 0, :T], (to_end.mT @ u)[:, :, 0]

    # u = u_v - u_k S for a state S that is not known yet; the same holds for all that is linear
    # in u, so that only the states are left to the loop.
    u = _solve(a, torch.cat([target, beta[..., None] * since_start * k], -1))
    o_v, o_k = (weight @ u).split([V, q.shape[-1]], -1)
    gain_v, gain_k = (to_end.mT @ u).split([V, q.shape[-1]], -1)
    keep = since_start[..., -1:, :] * torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)
    s_BHDV = torch.zeros_like(gain_v[:, :, 0]) if s_BHDV is None else s_BHDV
    s_BHNDV, last_BHDV = _states(s_BHDV, keep - gain_k, gain_v)
    o = o_v + (since_start * q - o_k) @ s_BHNDV
    return o.flatten(2, 3)[:, :, :T], last_BHDV


def _begins(start_BT: Tensor) -> Tensor:
    """Return whether each token is the first of its document [B, T]."""
    return start_BT == torch.arange(start_BT.shape[1], device=start_BT.device)


def _in_chunks(start_BT: Tensor, N: int, C: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return masks that broadcast over [B, H, N, C, C]: which tokens of a chunk share a document.

    With each other; with a token before the chunk [.., C, 1]; with the chunk's last [.., C, 1].
    """
    more = N * C - start_BT.shape[1]
    # What fills the last chunk belongs to the last document.
    filled = torch.cat([start_BT, start_BT[:, -1:].expand(-1, more)], 1)
    start_B1NC = filled.unflatten(1, (N, C))[:, None]
    begin_N1 = C * torch.arange(N, device=start_BT.device)[:, None]
    among = start_B1NC[..., :, None] == start_B1NC[..., None, :]
    return among, (start_B1NC < begin_N1)[..., None], among[..., -1:]


def _solve(a: Tensor, right: Tensor) -> Tensor:
    """Return u of (1 + a) u = right; of `a` only what is below the diagonal counts."""
    return torch.linalg.solve_triangular(a, right, upper=False, unitriangular=True)


def _states(s_BHDV: Tensor, keep_BHNDD: Tensor, gain_BHNDV: Tensor) -> tuple[Tensor, Tensor]:
    """Return the states before each chunk [B, H, N, D, V], and the one after the last."""
    s, before = s_BHDV.flatten(0, 1), []
    for keep, gain in zip(
        keep_BHNDD.flatten(0, 1).unbind(1), gain_BHNDV.flatten(0, 1).unbind(1), strict=True
    ):
        before.append(s)
        s = torch.baddbmm(gain, keep, s)
    return torch.stack(before, 1).unflatten(0, s_BHDV.shape[:2]), s.view_as(s_BHDV)
