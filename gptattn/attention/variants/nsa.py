"""Native sparse attention: compressed blocks, the blocks they point to, and a window, each gated.

Letters besides those in `base.py`: C compressed blocks, J blocks that can be selected, N of either
or of tokens, L tokens in a block, X = L * D.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from msgspec import Meta
from torch import Tensor, nn

from gptattn.attention.base import Shared
from gptattn.attention.cache import BlockCache, Cache, Entry, TokenCache, new_token_cache
from gptattn.attention.core import Backend
from gptattn.attention.linear import Linear
from gptattn.attention.rule import Rule, Span, attention_weights, place, weights
from gptattn.attention.softmax import Heads, Placed, SoftmaxAttention, seen_pairs, split_heads
from gptattn.position.base import Documents, HeadPosition, Positions

Count = Annotated[int, Meta(ge=1)]


class Compression(nn.Module):
    """A learned map from the L tokens of a block to one: W_out gelu(W_in (tokens + positions)).

    The tokens [..., L * D] are side by side, each with a learned vector of its place in the block.
    """

    def __init__(self, block: int, head_dim: int) -> None:
        super().__init__()
        X = block * head_dim
        self.position_X = nn.Parameter(torch.zeros(X))
        # No Linear layers, whose weights are drawn small: the result is about as large as a token.
        self.W_in_DX = nn.Parameter(torch.randn(head_dim, X) * X**-0.5)
        self.W_out_DD = nn.Parameter(torch.randn(head_dim, head_dim) * head_dim**-0.5)

    def forward(self, x_BGNX: Tensor) -> Tensor:
        hidden_BGND = F.linear(x_BGNX + self.position_X, self.W_in_DX)
        return F.linear(F.gelu(hidden_BGND), self.W_out_DD)


class NativeSparseAttention(SoftmaxAttention):
    """The sum of three attentions of the same queries, each times a gate sigmoid(x W) per head.

    x [B, T, d_in] -> y [B, T, d_out]. Each branch has keys and values of its own, of num_kv_heads
    heads. The compressed branch sees one entry for each complete block of `block` tokens, which
    begin every `stride` tokens. The selected branch sees all tokens of `topk` blocks of
    `select_block` tokens, side by side: the first one, the newest two, and those with the highest
    scores. A score is the sum of the compressed branch's weights over the heads of a group and the
    blocks that overlap, each times overlap / stride; of equal scores the newest block is chosen.
    The window branch sees the newest `window` tokens. Blocks are counted from the start of a text.

    A compressed entry is a `Compression` of keys before the position, or of values, shared by the
    heads. Its position is that of its last token. The paper says neither, nor the size of its MLP;
    here it has one hidden layer of D numbers. Gates have no bias, as in the fla library; there, the
    branches share keys and values, and a compressed block is a mean.

    `num_kv_heads` counts the heads of all branches after construction, as parts change all. Choices
    have no gradient. `attention_weights` are the branches' weights averaged by their gates; tokens
    share the weight of a compressed block. Raises ValueError for sizes that do not fit.

    Source: Yuan et al. 2025, arXiv:2502.11089, sec. 3.2 and 3.3; forced blocks: sec. 4.1.
    """

    stops_gradient: ClassVar[bool] = True
    takes_flex: ClassVar[bool] = False  # blocks are chosen by their scores

    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int,
        num_heads: int,
        num_kv_heads: int = 2,
        *,
        block: Count = 8,
        stride: Count = 4,
        select_block: Count = 8,
        topk: Annotated[int, Meta(ge=3)] = 8,
        window: float | None = 0.125,
        qkv_bias: bool = False,
        out_bias: bool = True,
        dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.0,
        scale: Annotated[float, Meta(gt=0)] | None = None,
        backend: Backend = "auto",
        position: HeadPosition | None = None,
    ) -> None:
        super().__init__(
            d_in,
            d_out,
            context_length,
            num_heads,
            num_kv_heads,
            dropout=dropout,
            scale=scale,
            window=window,
            backend=backend,
            position=position,
        )
        if block % stride:
            raise ValueError(f"block={block} must be a multiple of stride={stride}")
        if select_block % stride or select_block < block:
            raise ValueError(
                f"select_block={select_block} must be a multiple of stride={stride}, "
                f"and block={block} or more"
            )
        self.block, self.stride, self.select_block, self.topk = block, stride, select_block, topk
        self.groups, self.num_kv_heads = num_kv_heads, 3 * num_kv_heads
        width = self.num_kv_heads * self.head_dim
        self.W_query = Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = Linear(d_in, width, bias=qkv_bias)
        self.W_value = Linear(d_in, width, bias=qkv_bias)
        self.W_branch = Linear(d_in, 3 * num_heads, bias=False)
        self.compress_key = Compression(block, self.head_dim)
        self.compress_value = Compression(block, self.head_dim)
        self.out_proj = Linear(d_out, d_out, bias=out_bias)

    def rule(self) -> Rule:
        return replace(self._plain, window=None)  # only the window branch has one

    def project(self, x_BTE: Tensor) -> Heads:
        """Return queries, keys and values; the heads of the latter by branches."""
        q_BHTD = split_heads(self.W_query(x_BTE), self.num_heads)
        k_BGTD = split_heads(self.W_key(x_BTE), self.num_kv_heads)
        return q_BHTD, k_BGTD, split_heads(self.W_value(x_BTE), self.num_kv_heads)

    def entries(self, x_BTE: Tensor, shared: Shared) -> tuple[Tensor, dict[str, Tensor]]:
        q_BHTD, k, v = self.project(x_BTE)
        for part in self._parts:
            q_BHTD, k, v = part.heads(q_BHTD, k, v, shared)
        raw_BGTD, k = k.split([self.groups, 2 * self.groups], dim=1)
        if self.position is not None:
            q_BHTD, k = self.position.rotate(q_BHTD, k, shared.positions)
        new = dict(zip(("k", "k_near"), k.chunk(2, dim=1), strict=True))
        new |= dict(zip(("v_raw", "v", "v_near"), v.chunk(3, dim=1), strict=True))
        gate_BHT1 = split_heads(torch.sigmoid(self.W_branch(x_BTE)), 3 * self.num_heads)
        return q_BHTD, new | {"k_raw": raw_BGTD, "gate": gate_BHT1}

    def cached(self) -> dict[str, Entry]:
        return dict.fromkeys(("k", "v"), Entry(self.groups, self.head_dim))

    def remember(
        self, new: Mapping[str, Tensor], cache: Cache | None, shared: Shared
    ) -> tuple[Mapping[str, Tensor], Positions]:
        """Return the entries of all keys and of the compressed blocks.

        "end" [B or 1, C] is the number of a block's last token, -1 for no block; "near" that of
        each token of the window branch, if they are not all.
        """
        positions = shared.positions
        if cache is None:
            T, pos_BT = new["k"].shape[2], _positions(positions, new["k"].device)
            is_end = (pos_BT >= self.block - 1) & ((pos_BT + 1 - self.block) % self.stride == 0)
            end_BT = torch.arange(T, device=pos_BT.device).where(is_end, -1)
            end_BC = end_BT.topk(max(1, T // self.stride), dim=-1).values
            blocks = self.compress(new, end_BC, _take(pos_BT, end_BC))
            return {**new, **blocks, "end": end_BC}, positions
        assert isinstance(cache, BlockCache), "not a cache of this module; use new_cache()"
        held, k_pos = cache.write({name: new[name] for name in self.kept()}, positions)
        near, number = cache.write_ring({name: new[name] for name in ("k_near", "v_near")})
        raw = {name: new[name] for name in ("k_raw", "v_raw")}
        blocks, end_BC = cache.write_blocks(raw, positions, self.compress)
        held = {**new, **held, **near, **blocks, "end": end_BC}
        return held | ({"near": number} if isinstance(number, Tensor) else {}), k_pos

    def compress(
        self, raw: Mapping[str, Tensor], end_BN: Tensor, pos_BN: Tensor
    ) -> dict[str, Tensor]:
        """Return the entries of the blocks that end at these places and positions; -1: no block."""
        at_BNL = end_BN[..., None] + torch.arange(1 - self.block, 1, device=end_BN.device)
        at_B1X1 = at_BNL.clamp_min(0).flatten(1)[:, None, :, None]
        k, v = (
            raw[name].take_along_dim(at_B1X1, 2).unflatten(2, (-1, self.block)).flatten(3)
            for name in ("k_raw", "v_raw")
        )
        k, v = self.compress_key(k), self.compress_value(v)
        if self.position is not None:
            k, _ = self.position.rotate(k, k, pos_BN)
        return {"k_block": k, "v_block": v}

    def attend(self, q_BHTD: Tensor, held: Mapping[str, Tensor], at: Placed) -> Tensor:
        blocks, chosen, near = self._branches(q_BHTD, held, at)
        k_BGSD, v_BGSD = held["k"], held["v"]
        if chosen.rule.bias is not None and q_BHTD.shape[2] == 1:
            k_BGSD, v_BGSD, chosen = self._gather(q_BHTD, held, at, blocks)
        ys = (
            self.mix(q_BHTD, held["k_block"], held["v_block"], blocks),
            self.mix(q_BHTD, k_BGSD, v_BGSD, chosen),
            self.mix(q_BHTD, held["k_near"], held["v_near"], near),
        )
        gated = [gate * y for gate, y in zip(held["gate"].chunk(3, dim=1), ys, strict=True)]
        return gated[0] + gated[1] + gated[2]

    def _branches(
        self, q_BHTD: Tensor, held: Mapping[str, Tensor], at: Placed
    ) -> tuple[Placed, Placed, Placed]:
        """Return rules and positions for the compressed, the selected and the window branch."""
        blocks = _only(at, held["end"])
        near = _only(at, held["near"][None]) if "near" in held else at
        near = near._replace(rule=replace(near.rule, window=self.window))
        J = self._count(held["k"].shape[2])
        if self.topk >= J:
            return blocks, at, near

        @torch.no_grad()
        def hide(query: Span, key: Span) -> Tensor:
            chosen_BGTN = self.choose(q_BHTD, held, at, blocks, query)
            seen_BGTJ = chosen_BGTN.new_zeros(*chosen_BGTN.shape[:3], J, dtype=torch.bool)
            seen_BGTJ.scatter_(-1, chosen_BGTN, True)
            # Of tokens that are none, which the rule hides, the first block stands for theirs.
            block_B11S = key.pos.clamp_min(0).div(self.select_block, rounding_mode="floor")
            return self._hidden(seen_BGTJ.take_along_dim(block_B11S, -1), q_BHTD.dtype)

        return blocks, at._replace(rule=replace(at.rule, bias=hide)), near

    def _count(self, tokens: int) -> int:
        return -(-tokens // self.select_block)

    def _hidden(self, seen_BGTS: Tensor, dtype: torch.dtype) -> Tensor:
        """Return -inf where a group's heads do not see a key, else 0: [B, H, T, S]."""
        hidden = torch.zeros_like(seen_BGTS, dtype=dtype).masked_fill_(~seen_BGTS, -math.inf)
        return hidden.repeat_interleave(self.num_heads // self.groups, dim=1)

    def choose(
        self,
        q_BHTD: Tensor,
        held: Mapping[str, Tensor],
        at: Placed,
        blocks: Placed,
        query: Span,
    ) -> Tensor:
        """Return the numbers [B, G, T, topk] of the blocks that these queries select.

        There are more blocks than that; a query that sees fewer gets some that it does not see.
        """
        k_BGCD, size = held["k_block"], self.select_block
        where = place(blocks.q_pos, blocks.k_pos, q_BHTD.shape[2], k_BGCD.shape[2], q_BHTD.device)
        span = replace(where[0], where=query.where)
        p_BHTC = weights(q_BHTD[:, :, query.where], k_BGCD, blocks.rule, span, where[1])
        p_BGTC = p_BHTC.unflatten(1, (self.groups, -1)).sum(2)
        last_BC1 = _take(_positions(at.k_pos, q_BHTD.device), held["end"])[..., None]
        J_J = torch.arange(self._count(held["k"].shape[2]), device=q_BHTD.device)
        begin_BCJ = (last_BC1 + 1 - self.block).maximum(J_J * size)
        shared_BCJ = ((last_BC1 + 1).minimum(J_J * size + size) - begin_BCJ).clamp_min(0)
        score_BGTJ = p_BGTC @ (shared_BCJ / self.stride).to(p_BGTC.dtype)[:, None]
        own_B1T1 = query.pos.div(size, rounding_mode="floor")
        fixed = (J_J == 0) | (own_B1T1 - 1 <= J_J)
        score_BGTJ = score_BGTJ.masked_fill(fixed, math.inf)
        score_BGTJ = score_BGTJ.masked_fill(own_B1T1 < J_J, -math.inf)
        newest_first = score_BGTJ.flip(-1).argsort(dim=-1, descending=True, stable=True)
        return len(J_J) - 1 - newest_first[..., : self.topk]

    def _gather(
        self, q_BHTD: Tensor, held: Mapping[str, Tensor], at: Placed, blocks: Placed
    ) -> tuple[Tensor, Tensor, Placed]:
        """Return keys and values of the blocks that one query selects, and what hides the rest."""
        S = held["k"].shape[2]
        query, _ = place(at.q_pos, at.k_pos, 1, S, q_BHTD.device)
        chosen_BGJ1 = self.choose(q_BHTD, held, at, blocks, query).mT
        place_L = torch.arange(self.select_block, device=q_BHTD.device)
        pos_BGN = (chosen_BGJ1 * self.select_block + place_L).flatten(2)
        # The newest token is the query's own: left padding shifts all places alike.
        number_BGN = pos_BGN + (S - 1 - query.pos[..., 0])
        hidden_BH1N = self._hidden((number_BGN < S).unsqueeze(2), q_BHTD.dtype)
        number_BGN = number_BGN.clamp_max(S - 1)
        k, v = (held[name].take_along_dim(number_BGN[..., None], 2) for name in ("k", "v"))
        rule = replace(at.rule, bias=lambda *_: hidden_BH1N)
        if rule.decay is not None:
            number_BHN = number_BGN.repeat_interleave(self.num_heads // self.groups, dim=1)
            c_BHN = rule.decay.at_key_BHS.take_along_dim(number_BHN, -1)
            rule = replace(rule, decay=replace(rule.decay, at_key_BHS=c_BHN))
        N = number_BGN.shape[2]
        return k, v, Placed(rule, range(N - 1, N), range(N))

    def attention_weights(self, x_BTE: Tensor, shared: Shared | None = None) -> Tensor:
        q_BHTD, held, at = self.project_and_cache(x_BTE, None, shared)
        placed, keys = self._branches(q_BHTD, held, at), ("k_block", "k", "k_near")
        w_BHTC, chosen, near = (
            attention_weights(q_BHTD, held[name], *one[:3])
            for name, one in zip(keys, placed, strict=True)
        )
        token_T, end_BC1 = torch.arange(x_BTE.shape[1], device=x_BTE.device), held["end"][..., None]
        inside_BCT = (token_T <= end_BC1) & (token_T > end_BC1 - self.block)
        spread = w_BHTC @ (inside_BCT / self.block).to(w_BHTC.dtype)[:, None]
        gates = held["gate"].chunk(3, dim=1)
        return (gates[0] * spread + gates[1] * chosen + gates[2] * near) / sum(gates)

    def new_cache(self, batch: int, capacity: int) -> Cache:
        tokens, entry = super().new_cache(batch, capacity), Entry(self.groups, self.head_dim)
        assert isinstance(tokens, TokenCache)
        like = tokens.tensors["k"]
        near = dict.fromkeys(("k_near", "v_near"), entry)
        ring = new_token_cache(near, batch, capacity, like.dtype, like.device, self.window)
        raw, blocks = (dict.fromkeys((f"k_{of}", f"v_{of}"), entry) for of in ("raw", "block"))
        return BlockCache(tokens, ring, raw, blocks, self.block, self.stride)

    def flops(self, T: int, S: int) -> int:
        """Return the FLOPs over the pairs that a query sees; see `Attention.flops`.

        Choosing computes the scores of the compressed blocks once more. Several queries mask the
        tokens that they do not select, but these do not count.
        """
        near, D = seen_pairs(T, S, replace(self.rule(), window=self.window)), self.head_dim
        seen = range(S - T + 1, S + 1)
        blocks = sum(max(0, (s - self.block) // self.stride + 1) for s in seen)
        hidden = sum(max(0, self._count(s) - self.topk) for s in seen) * self.select_block
        pairs = 3 * blocks + 2 * (seen_pairs(T, S, self.rule()) - hidden + near)
        # Weights without Linear layers: of keys and values, in each group, every `stride` tokens.
        compressed = 2 * T * self.groups * (self.block + 1) * D * D // self.stride
        return 2 * (self.num_heads * D * pairs + compressed)


def _positions(positions: Positions, device: torch.device) -> Tensor:
    """Return the positions [B or 1, T] in the text, -1 for no token."""
    if isinstance(positions, range):
        return torch.arange(positions.start, positions.stop, device=device)[None]
    if isinstance(positions, Documents):
        return positions.position_BT
    return positions.reshape(-1, positions.shape[-1])


def _take(x_BS: Tensor, number_BN: Tensor) -> Tensor:
    """Return x of the tokens of these numbers, -1 for no token."""
    return x_BS.take_along_dim(number_BN.clamp_min(0), -1).where(number_BN >= 0, -1)


def _only(at: Placed, number_BN: Tensor) -> Placed:
    """Return the rule and positions with the keys of these tokens alone; -1: no token."""
    rule, q_pos = at.rule, at.q_pos
    if rule.decay is not None:
        c_BHN = rule.decay.at_key_BHS.take_along_dim(number_BN.clamp_min(0)[:, None], -1)
        rule = replace(rule, decay=replace(rule.decay, at_key_BHS=c_BHN))
    if not isinstance(q_pos, Documents):
        return Placed(rule, q_pos, _take(_positions(at.k_pos, number_BN.device), number_BN))
    # Documents are those of all tokens; here places in the row order them, and a bias parts them.
    start_BT = q_pos.start_BT
    start_BN = start_BT.take_along_dim(number_BN.clamp_min(0), -1)

    def part(query: Span, key: Span) -> Tensor:
        apart = query.of(start_BT[:, None]) != key.of(start_BN[:, None])
        return torch.zeros_like(apart, dtype=torch.float32).masked_fill(apart, -math.inf)

    return Placed(replace(rule, bias=part), range(start_BT.shape[1]), number_BN)
