"""Softmax attention over heads: the steps that all of its variants share, and where parts act."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn

from gptattn.attention.base import Carried, check_sizes, window_of
from gptattn.attention.cache import Cache
from gptattn.attention.capabilities import HasMaps
from gptattn.attention.core import Backend, attend, check_backend
from gptattn.attention.heads import seen_pairs
from gptattn.attention.parts.host import PartHost, own_cache
from gptattn.attention.rule import Rule, attention_weights
from gptattn.attention.scores import Blend
from gptattn.attention.token_cache import Entry, new_token_cache
from gptattn.position.base import HeadPosition, Positions

Heads = tuple[Tensor, Tensor, Tensor]  # queries [B, H, T, D], keys and values [B, G, T, D]


class SoftmaxAttention(PartHost, HasMaps):
    """Attention with H query heads and G key/value heads; a variant says how to project.

    x [B, T, d_in] -> y [B, T, d_out]. `window` is in tokens, or a share of the context below 1.
    Raises ValueError for impossible sizes.
    """

    keeps_documents: ClassVar[bool] = True
    out_proj: nn.Linear | None

    def __init__(
        self,
        *,
        d_in: int,
        d_out: int,
        context_length: int,
        num_heads: int,
        num_kv_heads: int,
        dropout: float,
        scale: float | None,
        window: float | None,
        backend: Backend,
        position: HeadPosition | None,
    ) -> None:
        super().__init__()
        check_sizes(d_out, num_heads, num_kv_heads, dropout)
        check_backend(backend, dropout)
        self.d_in, self.d_out, self.context_length = d_in, d_out, context_length
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim = d_out // num_heads
        self.window = window_of(window, context_length)
        self._plain = Rule(self.head_dim**-0.5 if scale is None else scale, self.window)
        self.scale = self._plain.scale
        self.dropout = dropout
        self.backend: Backend = backend
        self.position = position

    @abstractmethod
    def project(self, x_BTE: Tensor) -> Heads:
        """Return queries [B, H, T, D], keys and values [B, G, T, D]; a variant may extend this."""

    def rule(self) -> Rule:
        return self._plain

    def located(self, x_BTE: Tensor, carried: Carried) -> Heads:
        """Return the result of `project` with parts and positions applied."""
        q_BHTD, k_BGTD, v_BGTD = self.heads_of_parts(*self.project(x_BTE), carried)
        if self.position is not None:
            q_BHTD, k_BGTD = self.position.rotate(q_BHTD, k_BGTD, carried.positions)
        return q_BHTD, k_BGTD, v_BGTD

    def forward(
        self, x_BTE: Tensor, cache: Cache | None = None, carried: Carried | None = None
    ) -> Tensor:
        carried = self.begin(x_BTE, cache, carried)
        q_BHTD, new = self.entries(x_BTE, cache, carried)
        held, k_pos = self.remember(new, cache, carried)
        rule = self._rule(new, held, carried.positions, k_pos)
        y_BHTD = self.attend(q_BHTD, held, rule, carried.positions, k_pos)
        y_BTE = self.merged(y_BHTD, x_BTE)
        return y_BTE if self.out_proj is None else self.out_proj(y_BTE)

    def entries(
        self, x_BTE: Tensor, cache: Cache | None, carried: Carried
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the queries, and what later tokens need of these T: `kept`, by name.

        Each entry is [B, heads, T, size].
        """
        q_BHTD, k_BGTD, v_BGTD = self.located(x_BTE, carried)
        return q_BHTD, {"k": k_BGTD, "v": v_BGTD} | self.entries_of_parts(x_BTE, cache)

    def remember(
        self, new: Mapping[str, Tensor], cache: Cache | None, carried: Carried
    ) -> tuple[Mapping[str, Tensor], Positions]:
        """Write the new entries to the cache; return those of all S keys, and their positions."""
        if cache is None:
            return new, carried.positions
        return own_cache(cache).write(new, carried.positions)

    def keys(self, held: Mapping[str, Tensor]) -> Tensor:
        """Return the keys [B, G, S, D] of these entries."""
        return held["k"]

    def attend(
        self,
        q_BHTD: Tensor,
        held: Mapping[str, Tensor],
        rule: Rule,
        q_pos: Positions,
        k_pos: Positions,
    ) -> Tensor:
        """Return the heads' outputs [B, H, T, D] over the keys whose entries are `held`."""
        return self.mixed(q_BHTD, held["k"], held["v"], rule, q_pos, k_pos)

    def mixed(
        self,
        q_BHTD: Tensor,
        k_BGSD: Tensor,
        v_BGSD: Tensor,
        rule: Rule,
        q_pos: Positions,
        k_pos: Positions,
        blend: Blend | None = None,
    ) -> Tensor:
        """Return `attend` of the core with this module's backend, and dropout in training."""
        return attend(
            q_BHTD,
            k_BGSD,
            v_BGSD,
            rule,
            q_pos=q_pos,
            k_pos=k_pos,
            dropout=self.dropout if self.training else 0.0,
            backend=self.backend,
            blend=blend,
        )

    def _rule(
        self,
        new: Mapping[str, Tensor],
        held: Mapping[str, Tensor],
        q_pos: Positions,
        k_pos: Positions,
    ) -> Rule:
        """Return the rule with what the parts and the position do to it."""
        rule = self.rule_of_parts(new, held)
        if self.position is not None and self.position.decays:
            at_query, at_key = self.position.decay(q_pos), self.position.decay(k_pos)
            rule = rule.with_decay(at_query, at_key)
        return rule

    def residual_writer(self) -> nn.Linear | None:
        return self.out_proj

    def kept(self) -> dict[str, Entry]:
        entry = Entry(self.num_kv_heads, self.head_dim)
        return {"k": entry, "v": entry} | self.kept_by_parts()

    def new_cache(self, batch: int, capacity: int) -> Cache:
        w, kept = next(self.parameters()), self.kept()
        if not kept:
            return Cache({})
        return new_token_cache(kept, batch, capacity, w.dtype, w.device, self.rule().window)

    def attention_weights(self, x_BTE: Tensor, carried: Carried | None = None) -> Tensor:
        carried = self.begin(x_BTE, None, carried)
        q_BHTD, new = self.entries(x_BTE, None, carried)
        held, k_pos = self.remember(new, None, carried)
        rule = self._rule(new, held, carried.positions, k_pos)
        k_BGSD = self.keys(held)
        return attention_weights(q_BHTD, k_BGSD, rule, q_pos=carried.positions, k_pos=k_pos)

    def flops(self, T: int, S: int) -> int:
        return 2 * 2 * self.num_heads * self.head_dim * seen_pairs(T, S, self.rule().window)
