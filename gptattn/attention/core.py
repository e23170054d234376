"""attend(): the single place where scores become outputs.

The backend `reference` is the definition: plain, readable, right in float64. The others must agree
with it in outputs and gradients. `sdpa` never holds all T x S scores and never copies keys or
values per query head: what torch's fused attention can do goes there, the rest in blocks of
queries. `flex` compiles the rule into one kernel on a GPU, and decodes as `sdpa` does.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from gptattn.attention.flex import by_flex, check_flex
from gptattn.attention.fused import can_fuse, fused
from gptattn.attention.rule import Rule
from gptattn.attention.scores import Blend, by_scores, scores_in_blocks
from gptattn.attention.spans import Standing
from gptattn.position.base import Positions

Backend = Literal["reference", "sdpa", "flex"]


def check_backend(backend: Backend, dropout: float = 0.0) -> None:
    """Raise ValueError if the backend does not exist, or not on this machine or with dropout."""
    if backend not in get_args(Backend):
        raise ValueError(f"backend={backend} is unknown; one of {list(get_args(Backend))}")
    if backend == "flex" and not torch.cuda.is_available():
        raise ValueError("backend=flex needs a CUDA device, and there is none; use sdpa")
    if backend == "flex" and dropout > 0:
        raise ValueError(f"backend=flex has no dropout, given {dropout}; use sdpa, or dropout 0")


def attend(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    rule: Rule,
    *,
    q_pos: Positions | None = None,
    k_pos: Positions | None = None,
    dropout: float = 0.0,
    backend: Backend = "sdpa",
    blend: Blend | None = None,
) -> Tensor:
    """Return attention outputs [B, H, T, D of v] under `rule`; zeros for a query that sees no key.

    `q_pos` and `k_pos` are the positions of the T queries and S keys: ranges, which are fastest
    because the host knows their values, or tensors, in any order, where -1 marks an entry without a
    token, or the same `Documents`, which do not see each other. By default T = S, and both count
    from 0. `dropout` acts on the weights after the softmax; pass 0 outside training. `blend`
    changes the weights after that; where it leaves fewer heads, outputs have that many, and v's
    heads divide them. Raises ValueError if the numbers of positions and tokens differ.
    """
    at = Standing(q_pos, k_pos, q_BHTD.shape[2], k_BGSD.shape[2], q_BHTD.device)
    if backend == "reference":
        return by_scores(q_BHTD, k_BGSD, v_BGSD, rule, dropout, *at.whole(), at.known, blend)
    if blend is not None:
        return scores_in_blocks(q_BHTD, k_BGSD, v_BGSD, rule, dropout, at, blend)
    if backend == "flex":
        check_flex(q_BHTD, rule, dropout)
        if at.same:  # positions change with each step of decoding, and a kernel would with them
            return by_flex(q_BHTD, k_BGSD, v_BGSD, rule, at.documents)
    if can_fuse(q_BHTD, rule, dropout):
        return fused(q_BHTD, k_BGSD, v_BGSD, rule, dropout, at)
    return scores_in_blocks(q_BHTD, k_BGSD, v_BGSD, rule, dropout, at)
