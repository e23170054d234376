"""How an attention carries its parts: it calls them in order, at each of their places."""

from abc import abstractmethod
from collections.abc import Mapping
from itertools import chain

import torch
from torch import Tensor, nn

from gptattn.attention.base import Attention, Carried
from gptattn.attention.cache import Cache
from gptattn.attention.capabilities import HasParts
from gptattn.attention.parts.part import Part
from gptattn.attention.rule import Rule
from gptattn.attention.token_cache import Entry, TokenCache


class PartHost(Attention, HasParts):
    """An attention with parts; without any, each of these methods gives back what it gets."""

    _parts: tuple[Part, ...] = ()

    @abstractmethod
    def rule(self) -> Rule:
        """Return the mechanism's own rule: which keys a query sees, and what happens to scores."""

    @abstractmethod
    def kept(self) -> dict[str, Entry]:
        """Return what the cache keeps for each token, by name, with what parts keep."""

    def add_part(self, name: str, part: Part) -> None:
        if not self.takes(type(part)):
            raise ValueError(
                f"{name} changes queries, keys and values of each head, and "
                f"{type(self).__name__} decodes without keys and values; leave the part out"
            )
        if twice := sorted(self.kept().keys() & part.kept().keys()):
            raise ValueError(f"{name} keeps {twice[0]} in the cache, as another does; rename it")
        if not self._parts:
            self.parts = nn.ModuleDict()  # last, so that weights are drawn after the projections
        try:
            self.parts[name] = part
        except KeyError:
            raise ValueError(
                f"no part can be called {name}, a word of torch's; rename it"
            ) from None
        self._parts = (*self._parts, part)
        self._check_window(name)

    @torch.no_grad()
    def _check_window(self, name: str) -> None:
        """Raise ValueError if the newest part cannot work on this mechanism's rule."""
        x_BTE = next(self.parameters()).new_zeros(1, 1, self.d_in)
        entries = self.entries_of_parts(x_BTE, None)
        if self.rule_of_parts(entries, entries).window != self.rule().window:
            raise ValueError(f"{name} changes the window, which no part can; set attn.window")

    def initialise(self, std: float) -> None:
        super().initialise(std)
        for part in self._parts:
            part.initialise(std)

    def heads_of_parts(
        self, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, carried: Carried
    ) -> tuple[Tensor, Tensor, Tensor]:
        for part in self._parts:
            q_BHTD, k_BGTD, v_BGTD = part.heads(q_BHTD, k_BGTD, v_BGTD, carried)
        return q_BHTD, k_BGTD, v_BGTD

    def entries_of_parts(self, x_BTE: Tensor, cache: Cache | None) -> dict[str, Tensor]:
        """Return what the parts keep of these T tokens, by name."""
        ours = None if cache is None else own_cache(cache)
        return dict(chain(*(part.entries(x_BTE, ours).items() for part in self._parts)))

    def kept_by_parts(self) -> dict[str, Entry]:
        return dict(chain(*(part.kept().items() for part in self._parts)))

    def rule_of_parts(self, new: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> Rule:
        """Return the rule with what the parts do to it; see `Part.rule`."""
        rule = self.rule()
        for part in self._parts:
            rule = part.rule(rule, new, held)
        return rule

    def merged(self, y_BHTD: Tensor, x_BTE: Tensor) -> Tensor:
        """Return the heads' outputs side by side [B, T, H * D], with what the parts do to them."""
        for part in self._parts:
            y_BHTD = part.mix(y_BHTD, x_BTE)
        y_BTE = y_BHTD.transpose(1, 2).flatten(2)
        for part in self._parts:
            y_BTE = part.output(y_BTE, x_BTE)
        return y_BTE

    def leaves(self) -> dict[str, str]:
        return dict(chain(*(part.leaves().items() for part in self._parts)))

    def needs(self) -> dict[str, str]:
        return dict(chain(*(part.needs().items() for part in self._parts)))


def own_cache(cache: Cache) -> TokenCache:
    """Return the cache as one with an entry per token. Raises TypeError if it is none."""
    if not isinstance(cache, TokenCache):
        raise TypeError(f"{type(cache).__name__} is not this module's; use new_cache()")
    return cache
