"""From logits to the next token: temperature, repetition penalty, top-k, top-p, min-p."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gptattn.errors import ConfigError, NumericError


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn.

    Raises ConfigError, naming the field, for an invalid value. Temperature 0 is greedy. top_k keeps
    the k likeliest tokens; top_p the fewest likeliest tokens whose probabilities sum to at least
    top_p (Holtzman et al. 2020, arXiv:1904.09751, sec. 3.1); min_p the tokens with at least min_p
    times the highest probability (Nguyen et al. 2024, arXiv:2407.01082, sec. 3). The repetition
    penalty divides the logit of a token seen before if it is positive, and multiplies it if it is
    negative (Keskar et al. 2019, arXiv:1909.05858, sec. 4.1). They act in this order: penalty,
    temperature, top_k, top_p, min_p.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf") or 0 < self.temperature < 1e-3:
            raise ConfigError(
                "temperature",
                f"{self.temperature} is out of range; give 0 for greedy, or 0.001 or more",
            )
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError("top_k", f"{self.top_k} is below 1; give 1 or more, or leave it out")
        for field in ("top_p", "min_p"):
            value = getattr(self, field)
            if value is not None and not 0 < value <= 1:
                raise ConfigError(field, f"{value} is out of range; give one above 0, at most 1")
        if not 1e-3 <= self.repetition_penalty <= 1e3:
            raise ConfigError(
                "repetition_penalty",
                f"{self.repetition_penalty} is out of range; give 0.001 to 1000; 1 has no effect",
            )

    def draw(self, logits_BV: Tensor, seen_BT: Tensor, generator: torch.Generator | None) -> Tensor:
        """Return the next ids [B, 1]; among equal logits, greedy takes the first.

        Raises NumericError if the largest logit is not finite.
        """
        if self.temperature == 0:
            # Widened: on a CPU the argmax of bfloat16 takes several times longer.
            logits = _check_finite(self._penalise(_widen(logits_BV), seen_BT))
            return logits.argmax(dim=-1, keepdim=True)
        return torch.multinomial(self.probabilities(logits_BV, seen_BT), 1, generator=generator)

    def _penalise(self, logits_BV: Tensor, seen_BT: Tensor) -> Tensor:
        if self.repetition_penalty == 1.0:
            return logits_BV
        seen, penalty = logits_BV.gather(1, seen_BT), self.repetition_penalty
        seen = torch.where(seen > 0, seen / penalty, seen * penalty)
        return logits_BV.scatter(1, seen_BT, seen)

    def probabilities(self, logits_BV: Tensor, seen_BT: Tensor) -> Tensor:
        """Return the distribution [B, V] of the next token, in float32 or a wider type.

        `seen_BT` are the ids so far, for the repetition penalty. Raises NumericError as `draw`.
        """
        logits = _widen(logits_BV)
        if self.temperature == 0:
            best = self.draw(logits, seen_BT, None)
            return torch.zeros_like(logits).scatter(1, best, 1.0)
        logits = _check_finite(self._penalise(logits, seen_BT) / self.temperature)
        if self.top_k is not None:
            kept = logits.topk(min(self.top_k, logits.shape[-1])).values[:, -1:]
            logits = logits.masked_fill(logits < kept, float("-inf"))
        p = logits.softmax(dim=-1)
        if self.top_p is not None and self.top_p < 1:
            p = _keep_top_p(p, self.top_p)
        if self.min_p is not None:
            p = p.masked_fill(p < self.min_p * p.max(dim=-1, keepdim=True).values, 0.0)
        return p / p.sum(dim=-1, keepdim=True)


def _widen(logits_BV: Tensor) -> Tensor:
    """Return the logits in float32, or as they are in a wider type."""
    return logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32))


def _check_finite(logits_BV: Tensor) -> Tensor:
    """Return the logits. Raises NumericError if a row's maximum is not finite.

    Checking the maximum is enough: it is NaN or infinite if any logit is NaN or +inf.
    """
    if not logits_BV.amax(dim=-1).isfinite().all():
        raise NumericError("logits", "of the next token are not finite; use other weights")
    return logits_BV


def _keep_top_p(p: Tensor, top_p: float) -> Tensor:
    ordered, order = p.sort(dim=-1, descending=True)
    # A token stays while those before it sum to less than top_p, so the first always stays.
    # In float64, because a sum that rounds up to top_p too early would drop tokens.
    before = ordered.cumsum(dim=-1, dtype=torch.float64) - ordered
    return torch.zeros_like(p).scatter(1, order, ordered.masked_fill(before >= top_p, 0.0))
