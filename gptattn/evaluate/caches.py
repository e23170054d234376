"""The kinds of cache that a trained model can decode through, by the names that users type."""

import re
from dataclasses import dataclass

from gptattn.attention.base import Attention
from gptattn.attention.cache import Cache, CacheGroup, TokenCache, new_token_cache
from gptattn.attention.quantised_cache import BFloat16, Format, Int4, Int8, QuantisedCache
from gptattn.attention.softmax import SoftmaxAttention
from gptattn.errors import ConfigError
from gptattn.model.gpt import GPT

FORMATS: dict[str, Format] = {"bf16": BFloat16(), "int8": Int8(), "int4": Int4()}
KEPT = re.compile(r"(?:sink(?P<sinks>[1-9]\d{0,8})\+)?window:(?P<window>[1-9]\d{0,8})")
KNOWN = f"full, {', '.join(FORMATS)}, window:N, sinkN+window:N"


@dataclass(frozen=True)
class CacheKind:
    """A kind of cache: in another number format, or with only the newest tokens.

    window: the number of newest tokens kept, in addition to the first `sinks`; None: all.
    """

    name: str
    form: Format | None = None
    sinks: int = 0
    window: int | None = None

    def replace_cache(self, own: Cache, attention: Attention) -> Cache:
        """Return an empty cache of this kind to replace the layer's `own`, or `own` itself.

        A layer keeps its own cache if that does not hold one entry per token, or holds no more
        tokens than this kind. Raises ConfigError for sinks that the layer's own window would hide.
        """
        if not (isinstance(attention, SoftmaxAttention) and type(own) is TokenCache):
            return own
        kept = attention.kept()
        if self.form is not None:
            packed = QuantisedCache(own, kept, self.form)
            return packed if packed.sizes else own
        if self.window is None or own.capacity <= self.sinks + self.window:
            return own
        if own.window is not None and self.sinks:
            raise ConfigError(
                "cache",
                f"{self.name}: the layer's own window of {own.window} tokens hides the sinks; give "
                f"window:{self.window}, or keep at least {own.window} tokens",
            )
        first = next(iter(own.tensors.values()))
        sizes = len(first), own.capacity, first.dtype, first.device
        new = new_token_cache(kept, *sizes, self.window, self.sinks)
        new.tensors |= {name: x for name, x in own.tensors.items() if name not in kept}
        return new


def parse_cache_kind(name: str) -> CacheKind:
    """Return the kind with this name. Raises ConfigError for an unknown one."""
    if name == "full":
        return CacheKind(name)
    if name in FORMATS:
        return CacheKind(name, FORMATS[name])
    found = KEPT.fullmatch(name)
    if found is None:
        raise ConfigError("cache", f"{name!r} is unknown; use {KNOWN}, such as sink4+window:60")
    return CacheKind(name, None, int(found["sinks"] or 0), int(found["window"]))


def build_caches(model: GPT, kind: CacheKind, batch: int, capacity: int) -> CacheGroup:
    """Return one empty cache per layer, of this kind where it changes the layer's own."""
    layers = [block.attention for block in model.layers()]
    return CacheGroup([kind.replace_cache(one.new_cache(batch, capacity), one) for one in layers])


def check_kind(model: GPT, kind: CacheKind, variant: str) -> None:
    """Raise ConfigError if this kind changes no layer; the model can be on the meta device."""
    T = model.context_length
    changed = build_caches(model, kind, 1, T).nbytes != model.new_cache(1, T).nbytes
    if kind.name != "full" and not changed:
        how = "give fewer tokens" if kind.window else "it packs only heads of 8 numbers, per token"
        raise ConfigError("cache", f"{kind.name} changes no cache of {variant}; omit it ({how})")
