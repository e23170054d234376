"""Kernels that stand in for those of fla, which run on a GPU only.

They take arguments by their names in fla-core 0.6.0, and compute what its documentation says, token
by token in float64.
"""

from itertools import pairwise

import torch
from torch import Tensor, einsum


def kernel(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    *,
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Each row is a sequence or, with `cu_seqlens`, its pieces from one of them to the next.

    q, k [B, T, H, K], v [B, T, H, V], g [B, T, H] in logarithms, with kda [B, T, H, K]; beta
    [B, T, H] in (0, 1), without it decayed linear attention; states [N, H, K, V].
    """
    assert q.shape[2] == v.shape[2]
    assert g.shape == (k.shape if name == "kda" else k.shape[:3])
    assert (beta is None) == (name == "simple_gla")
    assert output_final_state
    q, k, v, g = (x.double() for x in (q, k, v, g))
    cuts = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    assert cu_seqlens is None or len(q) == 1
    outputs, states = [], []
    for begin, end in pairwise(cuts):
        s = q.new_zeros(len(q), q.shape[2], q.shape[3], v.shape[3])
        s = s if initial_state is None else initial_state
        for t in range(begin, end):
            decay = g[:, t].exp()
            s = s * (decay[..., None] if decay.ndim == 3 else decay[..., None, None])
            write = v[:, t]
            if beta is not None:
                write = beta[:, t, :, None] * (write - einsum("bhk,bhkv->bhv", k[:, t], s))
            s = s + einsum("bhk,bhv->bhkv", k[:, t], write)
            outputs.append(einsum("bhk,bhkv->bhv", scale * q[:, t], s))
        states.append(s)
    return torch.stack(outputs, 1), torch.cat(states)
