"""From logits to the next token: temperature and top-k."""

from dataclasses import dataclass
from typing import Annotated

import torch
from msgspec import Meta
from torch import Tensor

from gptattn.errors import NumericError
from gptattn.settings.values import check_type, list_hints

GREEDY = 1e-6  # decode greedily below this temperature: divided logits could be infinite


@dataclass(frozen=True)
class Sampling:
    """How to draw a token.

    A temperature below GREEDY is greedy. top_k keeps the k likeliest tokens. Raises ConfigError,
    naming the field, for an invalid value.
    """

    temperature: Annotated[float, Meta(ge=0)] = 1.0
    top_k: Annotated[int, Meta(ge=1)] | None = None

    def __post_init__(self) -> None:
        for name, hint in list_hints(Sampling).items():
            check_type(name, getattr(self, name), hint)

    def draw(self, logits_BV: Tensor, generator: torch.Generator | None) -> Tensor:
        """Return the next ids [B, 1]; of equal logits, greedy decoding takes the first.

        The softmax is in float32 or wider. Raises NumericError if the largest logit is not finite.
        """
        # On a CPU the argmax of bfloat16 takes several times longer than that of float32.
        logits = logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32))
        # A row's largest logit is NaN or infinite if any is NaN or +inf.
        if not logits.amax(dim=-1).isfinite().all():
            raise NumericError("logits", "are not finite for the next token; use other weights")
        if self.temperature < GREEDY:
            return logits.argmax(dim=-1, keepdim=True)
        logits = logits / self.temperature
        if self.top_k is not None:
            kept = logits.topk(min(self.top_k, logits.shape[-1])).values[:, -1:]
            logits = logits.masked_fill(logits < kept, float("-inf"))
        return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)
