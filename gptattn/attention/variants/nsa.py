"""Native sparse attention: compressed blocks, the blocks they point to, and a window, each gated.

Letters besides those in `base.py`: C compressed blocks, J blocks that can be selected, N some of
the blocks or tokens, X numbers of all tokens of a block.
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
from gptattn.attention.cache import BlockCache, Cache, Entry, TokenCache, count_blocks
from gptattn.attention.core import Backend
from gptattn.attention.linear import Linear
from gptattn.attention.rule import Rule, Span, attention_weights, place, weights
from gptattn.attention.softmax import Heads, Placed, SoftmaxAttention, seen_pairs, split_heads
from gptattn.position.base import Documents, HeadPosition, Positions

Count = Annotated[int, Meta(ge=1)]
NEAR, RAW, BLOCKS = ("k_near", "v_near"), ("k_raw", "v_raw"), ("k_block", "v_block")


class Compression(nn.Module):
    """A learned map of the tokens of a block, side by side, to one: W_out gelu(W_in (x + p)).

    p has a learned vector for each place in the block.
    """

    def __init__(self, block: int, head_dim: int) -> None:
        super().__init__()
        self.position_X = nn.Parameter(torch.zeros(block * head_dim))
        self.W_in_DX = nn.Parameter(torch.empty(head_dim, block * head_dim))
        self.W_out_DD = nn.Parameter(torch.empty(head_dim, head_dim))
        self.draw()

    @torch.no_grad()
    def draw(self) -> None:
        """Draw weights with which an entry is about as large as a token from the start."""
        for weight in (self.W_in_DX, self.W_out_DD):
            weight.normal_(0.0, weight.shape[1] ** -0.5)

    def forward(self, x_BGNX: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x_BGNX + self.position_X, self.W_in_DX)), self.W_out_DD)


class NativeSparseAttention(SoftmaxAttention):
    """The sum of three attentions of the same queries, each times a gate sigmoid(x W) per head.

    x [B, T, d_in] -> y [B, T, d_out]. Each branch has keys and values of its own, num_kv_heads of
    each. The compressed branch sees one entry for each complete block of `block` tokens, of which
    one begins every `stride` tokens. The selected branch sees the tokens of `topk` blocks of
    `select_block` tokens, side by side: the first, the newest two, and those with the highest
    scores. A score sums the compressed branch's weights over the heads of a group and over the
    compressed blocks, each times overlap / stride; of equal ones the newest is chosen. The window
    branch sees the newest `window` tokens. Blocks are counted from the first token.

    An entry is a `Compression` of keys before they rotate, or of values, shared by the heads, at
    the position of its last token. The paper leaves both open, and the MLP's size, here one hidden
    layer of D. Gates have no bias, as in fla, whose branches share keys and values, and whose
    entries are means.

    Once built, `num_kv_heads` counts all branches, as parts act on all. The choice has no gradient.
    `attention_weights` averages the branches by their gates; a block's weight is spread over its
    tokens. Raises ValueError for sizes that do not fit.

    Source: Yuan et al. 2025, arXiv:2502.11089, sec. 3.2 and 3.3; blocks always chosen: sec. 4.1.
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
        sizes = d_in, d_out, context_length, num_heads, num_kv_heads
        super().__init__(
            *sizes, dropout=dropout, scale=scale, window=window, backend=backend, position=position
        )
        for name, size, least in (("block", block, 1), ("select_block", select_block, block)):
            if size % stride or size < least:
                raise ValueError(f"{name}={size} must be a multiple of {stride=}, from {least} on")
        self.block, self.stride, self.select_block, self.topk = block, stride, select_block, topk
        self.groups, self.num_kv_heads = num_kv_heads, 3 * num_kv_heads
        self.W_query = Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = Linear(d_in, self.num_kv_heads * self.head_dim, bias=qkv_bias)
        self.W_value = Linear(d_in, self.num_kv_heads * self.head_dim, bias=qkv_bias)
        self.W_branch = Linear(d_in, 3 * num_heads, bias=False)
        self.compress_key = Compression(block, self.head_dim)
        self.compress_value = Compression(block, self.head_dim)
        self.out_proj = Linear(d_out, d_out, bias=out_bias)

    def initialise(self, std: float) -> None:
        super().initialise(std)
        self.compress_key.draw()
        self.compress_value.draw()

    def rule(self) -> Rule:
        return replace(self._plain, window=None)  # only the window branch has one

    def project(self, x_BTE: Tensor) -> Heads:
        q_BHTD = split_heads(self.W_query(x_BTE), self.num_heads)
        k_BGTD = split_heads(self.W_key(x_BTE), self.num_kv_heads)
        return q_BHTD, k_BGTD, split_heads(self.W_value(x_BTE), self.num_kv_heads)

    def entries(self, x_BTE: Tensor, shared: Shared) -> tuple[Tensor, dict[str, Tensor]]:
        q_BHTD, k, v = self.project(x_BTE)
        for part in self._parts:
            q_BHTD, k, v = part.heads(q_BHTD, k, v, shared)
        new: dict[str, Tensor] = {}
        new["k_raw"], k = k.split([self.groups, 2 * self.groups], dim=1)
        if self.position is not None:
            q_BHTD, k = self.position.rotate(q_BHTD, k, shared.positions)
        new["k"], new["k_near"] = k.chunk(2, dim=1)
        new["v_raw"], new["v"], new["v_near"] = v.chunk(3, dim=1)
        new["gate"] = split_heads(torch.sigmoid(self.W_branch(x_BTE)), 3 * self.num_heads)
        return q_BHTD, new

    def cached(self) -> dict[str, Entry]:
        return dict.fromkeys(("k", "v"), Entry(self.groups, self.head_dim))

    def remember(
        self, new: Mapping[str, Tensor], cache: Cache | None, shared: Shared
    ) -> tuple[Mapping[str, Tensor], Positions]:
        """Return the entries of all keys and blocks, and the positions of the selected branch's.

        Besides: "pos" [B or 1, S], the positions in a document; "end" [B or 1, C], which token is
        the last of a block, -1 for no block; "near" [1, N], which tokens the window branch has, if
        not all.
        """
        held, k_pos = {**new}, shared.positions
        if cache is not None:
            assert isinstance(cache, BlockCache), "not a cache of this module; use new_cache()"
            stored, k_pos = cache.write({name: new[name] for name in self.kept()}, k_pos)
            ring = TokenCache({name: cache.tensors[name] for name in NEAR}, self.window)
            ring.length = cache.length
            near, which = ring.write({name: new[name] for name in NEAR})
            held |= stored | near | ({"near": which[None]} if isinstance(which, Tensor) else {})
            raw = {name: new[name] for name in RAW}
            held["end"] = cache.write_blocks(raw, shared.positions, self.compress)
            held |= {name: cache.tensors[name][:, :, : held["end"].shape[1]] for name in BLOCKS}
        S, device = held["k"].shape[2], held["k"].device
        pos_BS = held["pos"] = Span(k_pos, slice(0, S), -2, device).pos[:, 0, 0]
        if cache is None:
            is_end = (pos_BS >= self.block - 1) & ((pos_BS + 1 - self.block) % self.stride == 0)
            end_BS = torch.arange(S, device=device).where(is_end, -1)
            end_BC = held["end"] = end_BS.topk(max(1, S // self.stride)).values
            held |= self.compress(new, end_BC, _take(pos_BS, end_BC))
        return held, k_pos

    def compress(
        self, raw: Mapping[str, Tensor], end_BN: Tensor, pos_BN: Tensor
    ) -> dict[str, Tensor]:
        """Return the entries of the blocks that end at these places and positions; -1: no block."""
        at_BNL = end_BN[..., None] + torch.arange(1 - self.block, 1, device=end_BN.device)
        at_B1M1 = at_BNL.clamp_min(0).flatten(1)[:, None, :, None]
        k, v = (raw[name].take_along_dim(at_B1M1, 2).unflatten(2, (-1, self.block)) for name in RAW)
        k, v = self.compress_key(k.flatten(3)), self.compress_value(v.flatten(3))
        if self.position is not None:
            k, _ = self.position.rotate(k, k, pos_BN)
        return {"k_block": k, "v_block": v}

    def attend(self, q_BHTD: Tensor, held: Mapping[str, Tensor], at: Placed) -> Tensor:
        gates, branches = held["gate"].chunk(3, dim=1), self._branches(q_BHTD, held, at)
        ys = [gate * self.mix(q_BHTD, *one) for gate, one in zip(gates, branches, strict=True)]
        return ys[0] + ys[1] + ys[2]

    def _branches(
        self, q_BHTD: Tensor, held: Mapping[str, Tensor], at: Placed
    ) -> list[tuple[Tensor, Tensor, Placed]]:
        """Return keys, values and rule of the compressed, the selected and the window branch."""
        k_BGSD, v_BGSD, pos_BS, end_BC = (held[name] for name in ("k", "v", "pos", "end"))
        T, S, R = q_BHTD.shape[2], k_BGSD.shape[2], self.num_heads // self.groups
        blocks = _only(at, pos_BS, end_BC.unsqueeze(1))
        near = _only(at, pos_BS, held["near"].unsqueeze(1)) if "near" in held else at
        near = near._replace(rule=replace(near.rule, window=self.window))
        queries, block = place(blocks.q_pos, blocks.k_pos, T, end_BC.shape[1], q_BHTD.device)
        size = self.select_block
        first_J = torch.arange(0, S, size, device=q_BHTD.device)

        @torch.no_grad()
        def choose(query: Span) -> Tensor:
            """Return [B, G, T, J], True for `topk` blocks, some perhaps behind these queries."""
            of_these = replace(queries, where=query.where)
            p = weights(q_BHTD[:, :, query.where], held["k_block"], blocks.rule, of_these, block)
            p_BGTC = p.unflatten(1, (-1, R)).sum(2)
            stop_BC1 = _take(pos_BS, end_BC).unsqueeze(2) + 1
            both_BCJ = stop_BC1.minimum(first_J + size) - first_J.maximum(stop_BC1 - self.block)
            score_BGTJ = p_BGTC @ (both_BCJ.clamp_min(0) / self.stride).to(p.dtype).unsqueeze(1)
            back_B1TJ = query.pos // size - first_J // size
            score_BGTJ = score_BGTJ.masked_fill((first_J == 0) | (back_B1TJ <= 1), math.inf)
            score_BGTJ = score_BGTJ.masked_fill(back_B1TJ < 0, -math.inf)
            newest_first = score_BGTJ.flip(-1).argsort(dim=-1, descending=True, stable=True)
            chosen = torch.zeros_like(score_BGTJ, dtype=torch.bool)
            return chosen.scatter(-1, newest_first[..., : self.topk], True).flip(-1)

        def hide_others(seen_BGTS: Tensor) -> Tensor:
            bias = torch.zeros_like(seen_BGTS, dtype=q_BHTD.dtype)
            return bias.masked_fill(~seen_BGTS, -math.inf).repeat_interleave(R, dim=1)

        def select(query: Span, key: Span) -> Tensor:
            block_B11S = key.pos.clamp_min(0) // size
            return hide_others(choose(query).take_along_dim(block_B11S, -1))

        selected = at
        if len(first_J) > self.topk and T > 1:
            selected = at._replace(rule=replace(at.rule, bias=select))
        elif len(first_J) > self.topk:  # one query reads the tokens of its blocks alone
            query, _ = place(at.q_pos, at.k_pos, 1, S, q_BHTD.device)
            chosen_BGJ = choose(query)[:, :, 0].byte().topk(self.topk).indices
            pos_BGN = (first_J[chosen_BGJ].unsqueeze(3) + first_J.new_tensor(range(size))).flatten(
                2
            )
            # It is the newest token: left padding shifts all by the same.
            number_BGN = pos_BGN + (S - 1 - query.pos[..., 0])
            seen_BGN, number_BGN = number_BGN < S, number_BGN.clamp_max(S - 1)
            k_BGSD, v_BGSD = (
                x.take_along_dim(number_BGN.unsqueeze(3), 2) for x in (k_BGSD, v_BGSD)
            )
            bias, N = hide_others(seen_BGN.unsqueeze(2)), seen_BGN.shape[2]
            rule = _only(at, pos_BS, number_BGN.repeat_interleave(R, dim=1)).rule
            selected = Placed(replace(rule, bias=lambda *_: bias), range(N - 1, N), range(N))
        return [
            (held["k_block"], held["v_block"], blocks),
            (k_BGSD, v_BGSD, selected),
            (held["k_near"], held["v_near"], near),
        ]

    def attention_weights(self, x_BTE: Tensor, shared: Shared | None = None) -> Tensor:
        q_BHTD, held, at = self.project_and_cache(x_BTE, None, shared)
        branches = self._branches(q_BHTD, held, at)
        maps = [attention_weights(q_BHTD, k, *one[:3]) for k, _, one in branches]
        back_BCT = held["end"].unsqueeze(2) - torch.arange(x_BTE.shape[1], device=x_BTE.device)
        inside_BCT = (back_BCT >= 0) & (back_BCT < self.block)
        maps[0] = maps[0] @ (inside_BCT / self.block).to(maps[0].dtype).unsqueeze(1)
        gates = held["gate"].chunk(3, dim=1)
        total = torch.stack([gate * w for gate, w in zip(gates, maps, strict=True)]).sum(0)
        return total / torch.stack(gates).sum(0)

    def new_cache(self, batch: int, capacity: int) -> Cache:
        tensors = super().new_cache(batch, capacity).tensors
        ring = capacity if self.window is None else min(capacity, self.window)
        blocks = max(1, count_blocks(capacity, self.block, self.stride)) + 1
        for names, places in ((NEAR, ring), (RAW, self.block - 1), (BLOCKS, blocks)):
            size = batch, self.groups, places, self.head_dim
            tensors |= {name: tensors["k"].new_zeros(size) for name in names}
        return BlockCache(tensors, self.block, self.stride)

    def flops(self, T: int, S: int) -> int:
        """Return the FLOPs over the pairs that a query sees; see `Attention.flops`.

        The scores of compressed blocks count twice, as the choice computes them again. Tokens that
        are not chosen do not count, though several queries mask them.
        """
        seen, D, size = range(S - T + 1, S + 1), self.head_dim, self.select_block
        blocks = sum(count_blocks(s, self.block, self.stride) for s in seen)
        selected = sum(min(s, self.topk * size - -s % size) for s in seen)
        near = seen_pairs(T, S, replace(self.rule(), window=self.window))
        # An entry in `stride` tokens of keys, and one of values, by both matrices.
        entries = 2 * T * self.groups * (self.block + 1) * D * D // self.stride
        return 2 * (self.num_heads * D * (3 * blocks + 2 * selected + 2 * near) + entries)


def _take(x_BS: Tensor, number_BN: Tensor) -> Tensor:
    """Return x of the tokens of these numbers, and -1 for -1, no token."""
    return x_BS.take_along_dim(number_BN.clamp_min(0), -1).where(number_BN >= 0, -1)


def _only(at: Placed, pos_BS: Tensor, number_BHN: Tensor) -> Placed:
    """Return the rule and positions for the keys of these numbers, in each head; -1: no token."""
    rule, q_pos = at.rule, at.q_pos
    if rule.decay is not None:
        c_BHN = rule.decay.at_key_BHS.take_along_dim(number_BHN.clamp_min(0), -1)
        rule = replace(rule, decay=replace(rule.decay, at_key_BHS=c_BHN))
    if not isinstance(q_pos, Documents):
        return Placed(rule, q_pos, _take(pos_BS, number_BHN[:, 0]))
    start_B1T = q_pos.start_BT.unsqueeze(1)

    def part(query: Span, key: Span) -> Tensor:
        """Hide other documents, where positions are places in the row."""
        return torch.where(key.pos < query.of(start_B1T), -math.inf, 0.0)

    return Placed(replace(rule, bias=part), range(pos_BS.shape[1]), number_BHN[:, 0])
