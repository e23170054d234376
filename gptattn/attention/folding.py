"""A decay as part of queries and keys, so that fused attention needs no bias."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from gptattn.attention.rule import Rule

MULTIPLE = 4  # head sizes that are multiples of this are fastest (MQA: 1.27 against 1.42 of plain)


def fold_decay(
    q_BHTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, rule: Rule
) -> tuple[Tensor, Tensor, Tensor, Rule]:
    """Return queries, keys and values of a larger D, and a rule without decay, for the same result.

    The outputs' first D numbers count, the others are 0. Keys stay one per group: each of its R
    query heads has a column of its own for -c_key, and its queries have a 1 there.

    The columns come first and the scale lies in the queries, because a product that sums in order
    then begins with c_query - c_key, which is exact where it matters: c itself may be thousands. At
    T = 4,096 and c = -2,800, float32 outputs are 1e-6 from float64's.
    """
    assert rule.decay is not None
    B, H, T, D = q_BHTD.shape
    G, S = k_BGSD.shape[1:3]
    c_BHT = rule.decay.at_query_BHT.to(q_BHTD.dtype).expand(B, H, T)
    c_BHS = rule.decay.at_key_BHS.to(k_BGSD.dtype).expand(B, H, S)
    own_HR = torch.eye(H // G, dtype=q_BHTD.dtype, device=q_BHTD.device).repeat(G, 1)
    own_BHTR = own_HR[None, :, None].expand(B, H, T, H // G)
    rest = -(1 + H // G + D) % MULTIPLE
    q = torch.cat([c_BHT[..., None], own_BHTR, q_BHTD * rule.scale], dim=-1)
    k_BGSR = -c_BHS.unflatten(1, (G, H // G)).mT
    k = torch.cat([k_BGSD.new_ones(B, G, S, 1), k_BGSR, k_BGSD], dim=-1)
    q, k = (F.pad(x, (0, rest)) if rest else x for x in (q, k))
    # Fused attention wants one size for all three.
    v = F.pad(v_BGSD, (0, q.shape[3] - v_BGSD.shape[3]))
    return q, k, v, replace(rule, scale=1.0, decay=None)
