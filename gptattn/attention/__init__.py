"""Attention mechanisms, their caches, and `attend()`, which turns scores into outputs.

Start reading at `base.py`, the contract, and `SoftmaxAttention.forward`. `variants/` has one file
per mechanism, `parts/` one per part. A new mechanism needs no line here: its file in `conf/attn`
names its class, and classes that aren't imported here are looked up in those two folders. This
package may import `position` and what comes before it.
"""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

from gptattn.attention.base import Attention, HasHeads, HasMaps, HeadWeights, Shared
from gptattn.attention.cache import Cache, CacheGroup, Entry, TokenCache, new_token_cache
from gptattn.attention.core import attend
from gptattn.attention.linear import Linear
from gptattn.attention.parts.base import Part
from gptattn.attention.rule import Rule, Span, attention_weights
from gptattn.attention.softmax import ProjectionOptions, SoftmaxAttention, SoftmaxOptions
from gptattn.attention.variants.gqa import GroupedQueryAttention
from gptattn.attention.variants.mha import MultiHeadAttention
from gptattn.attention.variants.mha_wrapper import MultiHeadAttentionWrapper
from gptattn.attention.variants.single_head import CausalAttention, SelfAttentionV1, SelfAttentionV2
from gptattn.machine.source_code import find_class


def __getattr__(name: str) -> Any:
    module = find_class(__name__, Path(__file__).parent, name) if name.isidentifier() else None
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    files = sorted(Path(__file__).parent.glob("*/*.py"))
    classes = [re.findall(r"^class ([A-Z]\w*)", file.read_text("utf-8"), re.M) for file in files]
    return sorted({*globals(), *(name for names in classes for name in names)})
