"""A forget gate in softmax attention."""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from gptattn.attention.cache import Cache, Entry, TokenCache
from gptattn.attention.linear import Linear
from gptattn.attention.parts.base import Part
from gptattn.attention.rule import Rule

SUM = "log_forget"  # the cache's name for a token's sum of log gates, its own included


class Forget(Part):
    """Adds to the score of query i and key j the sum of log f over the tokens j < l <= i.

    f = sigmoid(x w_f + b_f) is a gate per token and head: d_in * H + H parameters, w_f drawn like
    any projection and b_f = 0, as in the authors' code. The cache keeps one running sum per head
    and token, in float32 or wider, because a sum over a long context has too few digits in 16 bits;
    in float32 a sum of -3,000 is precise to 1e-4.

    Source: Lin et al. 2025, arXiv:2503.02130, sec. 3.
    """

    refuses: Mapping[str, str] = {
        "alibi": "both lower scores with distance; the forget gate's bias b_f can learn "
        "ALiBi's slope"
    }

    def __init__(self, d_in: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.W_forget = Linear(d_in, num_heads)

    def kept(self) -> dict[str, Entry]:
        return {SUM: Entry(heads=self.num_heads, size=1, wide=True)}

    def entries(self, x_BTE: Tensor, cache: Cache | None) -> dict[str, Tensor]:
        logit_BHT1 = self.W_forget(x_BTE).mT.unsqueeze(-1)
        # In float64: float32 has only four decimals for a sum of thousands.
        c_BHT1 = F.logsigmoid(logit_BHT1.double()).cumsum(-2)
        # Left padding adds the same to all sums of its row, and only differences matter.
        if isinstance(cache, TokenCache) and cache.length > 0:
            c_BHT1 = c_BHT1 + cache.newest(SUM)
        return {SUM: c_BHT1}

    def rule(self, rule: Rule, new: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> Rule:
        return rule.with_decay(new[SUM].squeeze(-1), held[SUM].squeeze(-1))
