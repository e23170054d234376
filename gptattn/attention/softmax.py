"""Softmax attention over heads: the steps that its mechanisms share, and where parts act."""

import inspect
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import Annotated, ClassVar, NamedTuple, TypedDict

import torch
import torch.nn.functional as F
from msgspec import Meta
from torch import Tensor, nn

from gptattn.attention.base import Attention, Masks, Shared, check_sizes, window_of
from gptattn.attention.cache import Cache, Entry, TokenCache, new_token_cache
from gptattn.attention.core import Backend, Blend, attend, check_flex, is_gpu, make_block_mask
from gptattn.attention.linear import Linear
from gptattn.attention.parts.base import Part
from gptattn.attention.rule import Rule, attention_weights
from gptattn.errors import ConfigError
from gptattn.machine.device import Toolchain
from gptattn.position.base import HeadPosition, Positions

HeadDim = Annotated[int, Meta(ge=1)] | None  # None: d_out / num_heads
Heads = tuple[Tensor, Tensor, Tensor]  # queries [B, H, T, D], keys and values [B, G, T, D]


class SoftmaxOptions(TypedDict, total=False):
    """Arguments of every softmax mechanism besides its sizes, passed on to `SoftmaxAttention`."""

    dropout: Annotated[float, Meta(ge=0, lt=1)]
    scale: Annotated[float, Meta(gt=0)] | None
    window: float | None
    chunk: int | None
    backend: Backend
    position: HeadPosition | None


class ProjectionOptions(SoftmaxOptions, total=False):
    """More arguments, for mechanisms with one projection each for queries, keys, values, output."""

    qkv_bias: bool
    out_proj: bool
    out_bias: bool


class PlacedRule(NamedTuple):
    """A rule with the positions of its queries and keys; `masks` as in `Shared`."""

    rule: Rule
    q_pos: Positions
    k_pos: Positions
    masks: Masks | None = None


class Step(NamedTuple):
    """Queries, entries of all keys, the rule, the input after parts, and the tokens' own entries.

    If a part uses values, `own` has them as "v".
    """

    q_BHTD: Tensor
    held: Mapping[str, Tensor]
    placed: PlacedRule
    x_BTE: Tensor
    own: Mapping[str, Tensor]


class SoftmaxAttention(Attention):
    """Attention with H query heads and G key/value heads; subclasses say how to project.

    x [B, T, d_in] -> y [B, T, d_out]. `dropout` acts on the weights. `scale` multiplies the scores;
    None: head_dim ** -0.5. `window` is a number of tokens, including the current one, or below 1 a
    share of the context; None: all. `chunk`, instead of a window, cuts a row into chunks of this
    length, and a token sees only its own chunk. (A recurrence's `chunk` hides nothing; it only sets
    how the result is computed.) Raises ValueError for impossible sizes.
    """

    keeps_documents: ClassVar[bool] = True
    plain_backend: ClassVar[str] = "sdpa"
    # Whether the cache holds keys and values of each head, which a part can change.
    keeps_heads: ClassVar[bool] = True
    has_values: ClassVar[bool] = True  # whether each head has values: `own_values`
    chooses_keys: ClassVar[bool] = False  # by scores, hiding others by a bias: no flex
    num_kv_heads: int  # 0: it projects no keys and values; parts get 0 heads
    out_proj: nn.Linear | None
    _parts: tuple[Part, ...] = ()

    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int,
        num_heads: int,
        num_kv_heads: int,
        *,
        dropout: float = 0.0,
        scale: float | None = None,
        window: float | None = None,
        chunk: int | None = None,
        backend: Backend = "auto",
        position: HeadPosition | None = None,
        head_dim: int | None = None,
    ) -> None:
        super().__init__()
        check_sizes(d_out if head_dim is None else num_heads, num_heads, num_kv_heads)
        if backend == "flex" and not torch.cuda.is_available():
            raise ValueError("backend=flex needs a CUDA device, but there is none; use sdpa")
        if backend == "flex" and self.chooses_keys:
            raise ValueError(f"backend=flex cannot compute {self.title}; use sdpa")
        self.d_in, self.d_out, self.context_length = d_in, d_out, context_length
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim = d_out // num_heads if head_dim is None else head_dim
        if chunk is not None and not 1 <= chunk <= context_length:
            raise ValueError(f"chunk={chunk} does not fit; give 1 to {context_length}")
        if chunk is not None and window is not None:
            raise ValueError(f"chunk={chunk} cannot be combined with a window; set one to null")
        # No token of an earlier chunk is needed again, so the cache is like a window's.
        self.window = window_of(window, context_length) if chunk is None else chunk
        default = self.head_dim**-0.5
        self._plain = Rule(default if scale is None else scale, self.window, chunk=chunk)
        if backend == "flex":
            check_flex(self._plain, dropout)
        self.scale = self._plain.scale
        self.dropout = dropout
        self.backend: Backend = backend
        if position is not None and head_dim is not None:
            position = position.resized(head_dim)
        self.position = position

    def project_out(self, present: bool, bias: bool) -> nn.Linear | None:
        """Return the output projection. Raises ValueError if it is left out but d_out needs it."""
        width = self.num_heads * self.head_dim
        if present:
            return Linear(width, self.d_out, bias=bias)
        if width != self.d_out:
            raise ValueError(
                f"out_proj=false needs num_heads * head_dim to be d_out={self.d_out}; use true"
            )
        return None

    # A token passes through these in order.

    def forward(
        self, x_BTE: Tensor, cache: Cache | None = None, shared: Shared | None = None
    ) -> Tensor:
        q_BHTD, held, placed, x_BTE, own = self.project_and_cache(x_BTE, cache, shared)
        y_BHTD = self.attend(q_BHTD, held, placed)
        for part in self._parts:
            y_BHTD = part.mix(y_BHTD, x_BTE, own)
        y_BTE = y_BHTD.transpose(1, 2).flatten(2)
        for part in self._parts:
            y_BTE = part.output(y_BTE, x_BTE)
        return y_BTE if self.out_proj is None else self.out_proj(y_BTE)

    def project_and_cache(self, x_BTE: Tensor, cache: Cache | None, shared: Shared | None) -> Step:
        shared = replace(self.begin(x_BTE, cache, shared), cache=cache)
        for part in self._parts:
            x_BTE = part.input(x_BTE, shared)
        q_BHTD, new = self.entries(x_BTE, shared)  # projections, parts, positions
        for part in self._parts:
            new |= part.entries(x_BTE, cache)
        held, k_pos = self.remember(new, cache, shared)
        rule = self.rule()
        for part in self._parts:
            rule = part.rule(rule, new, held)
        if rule.bias is not None and self.chooses_keys:
            raise ConfigError(
                "part", f"{self.title} takes no score bias; leave out the part that adds one"
            )
        if self.position is not None and self.position.decays:
            decays = self.position.decay(shared.positions), self.position.decay(k_pos)
            rule = rule.with_decay(*decays)
        if any(part.uses_values for part in self._parts):
            new["v"] = self.own_values(new, shared)
        masks = shared.masks if cache is None else {}
        return Step(q_BHTD, held, PlacedRule(rule, shared.positions, k_pos, masks), x_BTE, new)

    @abstractmethod
    def project(self, x_BTE: Tensor) -> Heads:
        """Return queries [B, H, T, D], keys and values [B, G, T, D] of these tokens."""

    def encode(self, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, shared: Shared) -> Heads:
        """Return queries, keys and values after parts and the position have acted."""
        for part in self._parts:
            q_BHTD, k_BGTD, v_BGTD = part.heads(q_BHTD, k_BGTD, v_BGTD, shared)
        if self.position is not None:
            q_BHTD, k_BGTD = self.position.rotate(q_BHTD, k_BGTD, shared.positions)
        for part in self._parts:
            q_BHTD, k_BGTD = part.rotated(q_BHTD, k_BGTD)
        return q_BHTD, k_BGTD, v_BGTD

    def entries(self, x_BTE: Tensor, shared: Shared) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the queries, and these T tokens' entries for later tokens, named as in `cached`.

        Each entry is [B, heads, T, size].
        """
        q_BHTD, k_BGTD, v_BGTD = self.encode(*self.project(x_BTE), shared)
        return q_BHTD, {"k": k_BGTD, "v": v_BGTD}

    def own_values(self, new: Mapping[str, Tensor], shared: Shared) -> Tensor:
        """Return the T tokens' own values [B, heads, T, size], from their `entries`."""
        return new["v"]

    def cached(self) -> dict[str, Entry]:
        """Return what the cache keeps per token, by name: keys and values; parts can add more."""
        entry = Entry(self.num_kv_heads, self.head_dim)
        return {"k": entry, "v": entry}

    def remember(
        self, new: Mapping[str, Tensor], cache: Cache | None, shared: Shared
    ) -> tuple[Mapping[str, Tensor], Positions]:
        """Write new entries to the cache; return all S keys' entries and positions."""
        if cache is None:
            return new, shared.positions
        assert isinstance(cache, TokenCache), "not a cache of this module; use new_cache()"
        return cache.write(new, shared.positions)

    def rule(self) -> Rule:
        """Return the mechanism's own rule: which keys a query sees, and what happens to scores."""
        return self._plain

    def attend(self, q_BHTD: Tensor, held: Mapping[str, Tensor], placed: PlacedRule) -> Tensor:
        """Return the heads' outputs [B, H, T, D] over the keys with the entries `held`."""
        return self.mix(q_BHTD, held["k"], held["v"], placed)

    def mix(
        self,
        q_BHTD: Tensor,
        k_BGSD: Tensor,
        v_BGSD: Tensor,
        placed: PlacedRule,
        blend: Blend | None = None,
    ) -> Tensor:
        """Call the core's `attend` with this module's backend, and dropout in training."""
        return attend(
            q_BHTD,
            k_BGSD,
            v_BGSD,
            *placed,
            dropout=self.dropout if self.training else 0.0,
            backend=self.backend,
            blend=blend,
        )

    # Kernels.

    def make_masks(self, x_BTE: Tensor, positions: Positions) -> Masks:
        if self.backend != "flex" or not is_gpu(x_BTE):
            return {}
        reach = self.rule().window, self.rule().chunk
        return {reach: make_block_mask(x_BTE.shape[1], reach, positions, x_BTE.device)}

    def choose_backend(
        self, x_BTE: Tensor, shared: Shared, dtype: torch.dtype, tools: Toolchain
    ) -> tuple[Backend, str]:
        q_BHTD, held, (rule, *_), *_ = self.project_and_cache(x_BTE, None, shared)
        T = x_BTE.shape[1]
        sees_all = min(rule.window or T, rule.chunk or T) >= T
        plain = sees_all and not rule.changes_scores and isinstance(shared.positions, range)
        if plain or self.chooses_keys:
            return "sdpa", ""
        sizes = q_BHTD.shape[3], held["v"].shape[3] if "v" in held else self.head_dim
        learned = rule.decay is not None and rule.decay.at_key_BHS.requires_grad
        obstacles = {
            tools.missing: bool(tools.missing),
            f"flex has no dropout (here {self.dropout})": self.dropout > 0,
            "flex cannot use a bias from a function": rule.bias is not None,
            # Triton needs at least 16, and torch tunes kernels up to 256.
            "flex supports heads of 16 to 256": min(sizes) < 16 or max(sizes) > 256,
            # Its error and time have not been measured on a GPU yet.
            "flex has not been measured in float32": dtype.itemsize > 2,
            "flex has not been measured with soft cap and decay": bool(rule.softcap and rule.decay),
            # Its gradient is summed by atomic additions: slow, and in random order.
            "flex has not been measured with a learned decay": learned,
        }
        why = next((reason for reason, holds in obstacles.items() if holds), "")
        return ("sdpa" if why else "flex"), why

    # Maps, costs, cache, weights.

    def attention_weights(self, x_BTE: Tensor, shared: Shared | None = None) -> Tensor:
        q_BHTD, held, placed, *_ = self.project_and_cache(x_BTE, None, shared)
        return attention_weights(q_BHTD, self.keys(held), *placed[:3])

    def keys(self, held: Mapping[str, Tensor]) -> Tensor:
        """Return the keys [B, G, S, D] of these entries."""
        return held["k"]

    def flops(self, T: int, S: int) -> int:
        return 2 * 2 * self.num_heads * self.head_dim * seen_pairs(T, S, self.rule())

    def kept(self) -> dict[str, Entry]:
        """Return all that the cache keeps per token, by name, parts' entries included."""
        return dict(chain(self.cached().items(), *(part.kept().items() for part in self._parts)))

    def new_cache(self, batch: int, capacity: int) -> Cache:
        w, kept, cache = next(self.parameters()), self.kept(), Cache({})
        if kept:
            options = w.dtype, w.device, self.rule().window
            cache = new_token_cache(kept, batch, capacity, *options)
        for name, shape in chain(*(part.state().items() for part in self._parts)):
            cache.tensors[name] = w.new_zeros(batch, *shape)
        return cache

    def initialise(self, std: float) -> None:
        super().initialise(std)
        for part in self._parts:
            part.initialise(std)

    # Parts.

    def takes(self, part: Part) -> bool:
        """Return whether this mechanism can take the part."""
        fits = self.keeps_heads or not part.changes_heads
        values = type(self).own_values is not SoftmaxAttention.own_values or "v" in self.cached()
        return fits and (not part.uses_values or (self.has_values and values))

    def add_part(self, name: str, part: Part) -> None:
        """Add a part under this name; parts act in the order in which you add them.

        Raises ValueError if it does not fit the mechanism.
        """
        if not self.takes(part):
            raise ValueError(
                f"{name} acts on each head's queries, keys or values, and "
                f"{type(self).__name__} does not have one of each per head; leave the part out"
            )
        try:
            inspect.signature(part.mix).bind(..., ..., ...)
        except TypeError:
            missing = f"{name}.mix has other arguments; define mix(self, y_BHTD, x_BTE, entries)"
            raise ValueError(missing) from None
        if not self._parts:
            self.parts = nn.ModuleDict()  # last, so that weights are drawn after the projections
        self.parts[name] = part
        self._parts = (*self._parts, part)

    def provides(self) -> dict[str, str]:
        return dict(chain(*(part.provides().items() for part in self._parts)))

    def needs(self) -> dict[str, str]:
        return dict(chain(*(part.needs().items() for part in self._parts)))


def split_heads(x_BTX: Tensor, heads: int) -> Tensor:
    """Return x [B, T, heads * D] as [B, heads, T, D]."""
    return x_BTX.unflatten(2, (heads, -1)).transpose(1, 2)


def seen_pairs(T: int, S: int, rule: Rule) -> int:
    """Count the pairs of a query and a key that it sees, in one causal head.

    The T queries are the last of S tokens.
    """
    chunk, window = rule.chunk or S, rule.window or S
    return sum(min((s - 1) % chunk + 1, window) for s in range(S - T + 1, S + 1))


def wide_rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Return gain * x / sqrt(mean(x^2) + eps) over the last axis, in the type of x.

    Computed in float32 or wider: a mean of squares has too few digits in 16 bits.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467, sec. 3.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(wide), gain.shape, gain.to(wide), eps).to(x.dtype)
