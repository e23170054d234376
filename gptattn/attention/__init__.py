"""Attention variants, their caches, and `attend()`, where scores become outputs. They may import
`position` and the rooms before it. Start reading at `base.py`, the contract; the menu is the folder
`conf/attn`, whose files each name a class: a new variant needs no line here.
"""

from gptattn.attention.base import Attention, HeadWeights
from gptattn.attention.cache import CacheGroup, KVCache
from gptattn.attention.core import attend, attention_weights
from gptattn.attention.gqa import GroupedQueryAttention
from gptattn.attention.mha import MultiHeadAttention
from gptattn.attention.single_head import CausalAttention, SelfAttentionV1, SelfAttentionV2
from gptattn.attention.wrapper import MultiHeadAttentionWrapper

__all__ = [
    "Attention",
    "CacheGroup",
    "CausalAttention",
    "GroupedQueryAttention",
    "HeadWeights",
    "KVCache",
    "MultiHeadAttention",
    "MultiHeadAttentionWrapper",
    "SelfAttentionV1",
    "SelfAttentionV2",
    "attend",
    "attention_weights",
]
