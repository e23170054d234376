"""Native sparse attention: compressed blocks, the blocks that they select, and a window, gated.

Letters besides those in `base.py`: C compressed blocks, J blocks to select from, N some blocks or
tokens, L tokens of a block, M = N L, X numbers of all tokens of a block, I keys and values.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from msgspec import Meta
from torch import Tensor, einsum, nn

from gptattn.attention.base import Shared
from gptattn.attention.cache import BlockCache, Cache, Entry, TokenCache, count_blocks
from gptattn.attention.core import Backend
from gptattn.attention.linear import Linear
from gptattn.attention.rule import Rule, Span, attention_weights, place, weights
from gptattn.attention.softmax import Heads, PlacedRule, SoftmaxAttention, seen_pairs, split_heads
from gptattn.position.base import Documents, HeadPosition, Positions

Count = Annotated[int, Meta(ge=1)]
NEAR, RAW, BLOCKS = ("k_near", "v_near"), ("k_raw", "v_raw"), ("k_block", "v_block")


class NativeSparseAttention(SoftmaxAttention):
    """The sum of three attentions of the same queries, each times a gate sigmoid(x W) per head.

    x [B, T, d_in] -> y [B, T, d_out]. Each branch has its own num_kv_heads heads of keys and
    values. The compressed branch sees one entry per complete block of `block` tokens; a block
    begins every `stride` tokens. Blocks of `select_block` tokens don't overlap; the selected branch
    sees `topk` of them: the first, the newest two, and those with the highest scores; of equal
    ones, the newest. A score sums the compressed branch's weights over a group's heads and the
    entries, each times overlap / stride. The window branch sees the newest `window` tokens.

    An entry is W_out gelu(W_in (the block's tokens, joined, + p)), of keys before they rotate or of
    values, at the position of its last token; p is learned, and heads share all three. The paper
    doesn't state this position, or the size of its MLP; here its hidden layer has D numbers. Gates
    have no bias, as in fla; there, branches share keys and values, and entries are means.

    Once built, `num_kv_heads` counts all branches, as parts act on all. A map averages the branches
    by their gates, and spreads an entry's weight over its tokens. Raises ValueError for bad sizes.

    Source: Yuan et al. 2025, arXiv:2502.11089, sec. 3.2 and 3.3; blocks always chosen: sec. 4.1.
    """

    stops_gradient: ClassVar[bool] = True
    has_values: ClassVar[bool] = False  # a token has three, one per branch
    chooses_keys: ClassVar[bool] = True

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
                fit = f"{stride * -(-least // stride)} or more, a multiple of {stride=}"
                raise ValueError(f"{name}={size} does not fit; give {fit}")
        if block > context_length:
            raise ValueError(f"{block=} must be at most {context_length=}")
        self.block, self.stride, self.select_block, self.topk = block, stride, select_block, topk
        self.groups, self.num_kv_heads = num_kv_heads, 3 * num_kv_heads
        self.W_query = Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = Linear(d_in, self.num_kv_heads * self.head_dim, bias=qkv_bias)
        self.W_value = Linear(d_in, self.num_kv_heads * self.head_dim, bias=qkv_bias)
        self.W_branch = Linear(d_in, 3 * num_heads, bias=False)
        # For keys and for values. Costs assume that Linear layers read each token, so these are
        # not Linear. With three axes or more, they train with AdamW and without weight decay.
        D, X = self.head_dim, block * self.head_dim
        self.place_I111X = nn.Parameter(torch.zeros(2, 1, 1, 1, X))
        self.W_in_IDX = nn.Parameter(torch.randn(2, D, X) * X**-0.5)
        self.W_out_IDD = nn.Parameter(torch.randn(2, D, D) * D**-0.5)
        self.out_proj = Linear(d_out, d_out, bias=out_bias)

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
        new = {"gate": split_heads(torch.sigmoid(self.W_branch(x_BTE)), 3 * self.num_heads)}
        new["k_raw"], k = k.split([self.groups, 2 * self.groups], dim=1)
        if self.position is not None:
            q_BHTD, k = self.position.rotate(q_BHTD, k, shared.positions)
        for part in self._parts:
            q_BHTD, k = part.rotated(q_BHTD, k)
        new["k"], new["k_near"] = k.chunk(2, dim=1)
        new["v_raw"], new["v"], new["v_near"] = v.chunk(3, dim=1)
        return q_BHTD, new

    def cached(self) -> dict[str, Entry]:
        return dict.fromkeys(("k", "v"), Entry(self.groups, self.head_dim))

    def remember(
        self, new: Mapping[str, Tensor], cache: Cache | None, shared: Shared
    ) -> tuple[Mapping[str, Tensor], Positions]:
        """Return the entries of all keys and blocks, and the keys' positions.

        Also "pos": those positions after a leading -1; "end" [B or 1, C]: the index of each block's
        last token, -1 for none; "near": token numbers in the window, if its ring has wrapped.
        """
        held, k_pos = {**new}, shared.positions
        if cache is not None:
            assert isinstance(cache, BlockCache), "not a cache of this module; use new_cache()"
            stored, k_pos = cache.write({name: new[name] for name in self.kept()}, k_pos)
            ring = TokenCache({name: cache.tensors[name] for name in NEAR}, self.window)
            ring.length = cache.length
            near, index = ring.write({name: new[name] for name in NEAR})
            if isinstance(index, Tensor):
                near["near"] = index[None, None]
            raw, pos = {name: new[name] for name in RAW}, shared.positions
            end_BC = cache.write_blocks(raw, pos, self.stride, self.compress)
            held |= stored | near | {"end": end_BC}
            held |= {name: cache.tensors[name][:, :, : end_BC.shape[1]] for name in BLOCKS}
        S, device = held["k"].shape[2], held["k"].device
        pos_BS = Span(k_pos, slice(0, S), -2, device).pos[:, 0, 0]
        held["pos"] = F.pad(pos_BS, (1, 0), value=-1)
        if cache is None:
            is_end = (pos_BS >= self.block - 1) & ((pos_BS + 1 - self.block) % self.stride == 0)
            end_BS = torch.arange(S, device=device).where(is_end, -1)
            end_BC = held["end"] = end_BS.topk(max(1, S // self.stride)).values
            held |= self.compress(new, end_BC, held["pos"].take_along_dim(end_BC + 1, -1))
        return held, k_pos

    def compress(
        self, raw: Mapping[str, Tensor], end_BN: Tensor, pos_BN: Tensor
    ) -> dict[str, Tensor]:
        """Return the entries of the blocks that end at these indices and positions; -1: none."""
        at_BNL = end_BN[..., None] + torch.arange(1 - self.block, 1, device=end_BN.device)
        at_B1M1 = at_BNL.clamp_min(0).flatten(1)[:, None, :, None]
        x_IBGMD = torch.stack([raw[name].take_along_dim(at_B1M1, 2) for name in RAW])
        x_IBGNX = x_IBGMD.unflatten(3, (-1, self.block)).flatten(4) + self.place_I111X
        hidden_IBGND = F.gelu(einsum("IBGNX,IDX->IBGND", x_IBGNX, self.W_in_IDX))
        k, v = einsum("IBGNE,IDE->IBGND", hidden_IBGND, self.W_out_IDD)
        if self.position is not None:
            k, _ = self.position.rotate(k, k, pos_BN)
        for part in self._parts:
            _, k = part.rotated(k, k)
        return {"k_block": k, "v_block": v}

    def attend(self, q_BHTD: Tensor, held: Mapping[str, Tensor], placed: PlacedRule) -> Tensor:
        ys = [self.mix(q_BHTD, *branch) for branch in self._branches(q_BHTD, held, placed)]
        return (held["gate"] * torch.cat(ys, 1)).unflatten(1, (3, -1)).sum(1)

    def _branches(
        self, q_BHTD: Tensor, held: Mapping[str, Tensor], placed: PlacedRule
    ) -> list[tuple[Tensor, Tensor, PlacedRule]]:
        """Return keys, values and rule of the compressed, selected and window branches."""
        k_BGSD, v_BGSD, pos, end_BC = (held[name] for name in ("k", "v", "pos", "end"))
        T, S, R = q_BHTD.shape[2], k_BGSD.shape[2], self.num_heads // self.groups
        blocks, size, selected = _only(placed, pos, end_BC[:, None]), self.select_block, placed
        near = _only(placed, pos, held["near"]) if "near" in held else placed
        near = near._replace(rule=replace(near.rule, window=self.window))
        queries, block = place(blocks.q_pos, blocks.k_pos, T, end_BC.shape[1], q_BHTD.device)
        first_J = torch.arange(0, S, size, device=q_BHTD.device)
        begin_BC = pos.take_along_dim(end_BC + 1, -1) + 1 - self.block
        begin_B11C = begin_BC.clamp_min(0)[:, None, None] // self.stride

        @torch.no_grad()
        def choose(query: Span) -> Tensor:
            """Return 0 at each query's `topk` blocks, perhaps some ahead, and -inf elsewhere."""
            of_these = replace(queries, where=query.where)
            p = weights(q_BHTD[:, :, query.where], held["k_block"], blocks.rule, of_these, block)
            p_BGTC = p.unflatten(1, (-1, R)).sum(2)
            # By the stride at which they begin, then summed over the entries that cover a stride.
            p_BGTN = p.new_zeros(*p_BGTC.shape[:3], len(first_J) * size // self.stride)
            p_BGTN = p_BGTN.scatter_add(-1, begin_B11C.expand_as(p_BGTC), p_BGTC)
            reach = self.block // self.stride
            p_BGTN = F.pad(p_BGTN, (reach - 1, 0)).unfold(-1, reach, 1).sum(-1)
            score_BGTJ = p_BGTN.unflatten(-1, (len(first_J), -1)).sum(-1)
            back_B1TJ = query.pos // size - first_J // size
            score_BGTJ = score_BGTJ.masked_fill((first_J == 0) | (back_B1TJ <= 1), torch.inf)
            score_BGTJ = score_BGTJ.masked_fill(back_B1TJ < 0, -torch.inf)
            newest_first = score_BGTJ.flip(-1).argsort(dim=-1, descending=True, stable=True)
            bias = torch.full_like(score_BGTJ, -torch.inf)
            return bias.scatter(-1, newest_first[..., : self.topk], 0.0).flip(-1)

        def hide(query: Span, key: Span) -> Tensor:
            chosen_BGTS = choose(query).take_along_dim(key.pos.clamp_min(0) // size, -1)
            return chosen_BGTS.repeat_interleave(R, 1)

        if len(first_J) > self.topk and T > 1:
            selected = placed._replace(rule=replace(placed.rule, bias=hide))
        elif len(first_J) > self.topk:  # a decoding step reads only its blocks
            query, _ = place(placed.q_pos, placed.k_pos, 1, S, q_BHTD.device)
            chosen_BGN = choose(query)[:, :, 0].topk(self.topk).indices.sort().values
            token_L = torch.arange(size, device=pos.device)
            pos_BGN = (size * chosen_BGN[..., None] + token_L).flatten(2)
            at_BGN = (pos_BGN + (S - 1 - query.pos[..., 0])).clamp_max(S - 1)
            k_BGSD, v_BGSD = (x.take_along_dim(at_BGN[..., None], 2) for x in (k_BGSD, v_BGSD))
            # Each group sees the first N of these, so one group's positions are right for all.
            rule = _only(placed, pos, at_BGN.repeat_interleave(R, 1)).rule
            selected = PlacedRule(rule, placed.q_pos, pos_BGN[:, 0])
        return [
            (held["k_block"], held["v_block"], blocks),
            (k_BGSD, v_BGSD, selected),
            (held["k_near"], held["v_near"], near),
        ]

    def attention_weights(self, x_BTE: Tensor, shared: Shared | None = None) -> Tensor:
        q_BHTD, held, placed, *_ = self.project_and_cache(x_BTE, None, shared)
        branches = self._branches(q_BHTD, held, placed)
        maps = [attention_weights(q_BHTD, k, *one[:3]) for k, _, one in branches]
        back_BCT = held["end"].unsqueeze(2) - torch.arange(x_BTE.shape[1], device=x_BTE.device)
        inside_BCT = (back_BCT >= 0) & (back_BCT < self.block)
        maps[0] = maps[0] @ (inside_BCT.to(maps[0].dtype) / self.block).unsqueeze(1)
        gate_BHT1, w_BHTS = held["gate"], held["gate"] * torch.cat(maps, 1)
        return w_BHTS.unflatten(1, (3, -1)).sum(1) / gate_BHT1.unflatten(1, (3, -1)).sum(1)

    def new_cache(self, batch: int, capacity: int) -> Cache:
        tensors = super().new_cache(batch, capacity).tensors
        ring = capacity if self.window is None else min(capacity, self.window)
        blocks = max(1, count_blocks(capacity, self.block, self.stride)) + 1
        for names, places in ((NEAR, ring), (RAW, self.block - 1), (BLOCKS, blocks)):
            size = batch, self.groups, places, self.head_dim
            tensors |= {name: tensors["k"].new_zeros(size) for name in names}
        return BlockCache(tensors)

    def flops(self, T: int, S: int) -> int:
        """Count only pairs that a query sees. Choosing blocks scores compressed entries again.

        That has no gradients, so it counts a third: training counts three times this number.
        """
        seen, D, size = range(S - T + 1, S + 1), self.head_dim, self.select_block
        blocks = sum(count_blocks(s, self.block, self.stride) for s in seen)
        selected = sum(min(s, self.topk * size - -s % size) for s in seen)
        making = 2 * T * self.groups * (self.block + 1) * D * D // self.stride  # keys and values
        choosing = blocks // (1 if T == 1 else 3) if self.topk * size < S else 0
        pairs = 2 * (blocks + selected + seen_pairs(T, S, self._plain)) + choosing
        return 2 * (self.num_heads * D * pairs + making)


def _only(placed: PlacedRule, pos: Tensor, number_BHN: Tensor) -> PlacedRule:
    """Return rule and positions for the keys with these numbers only, per head; -1: none."""
    rule, q_pos = placed.rule, placed.q_pos
    if rule.decay is not None:
        c_BHN = rule.decay.at_key_BHS.take_along_dim(number_BHN.clamp_min(0), -1)
        rule = replace(rule, decay=replace(rule.decay, at_key_BHS=c_BHN))
    if not isinstance(q_pos, Documents):
        return PlacedRule(rule, q_pos, pos.take_along_dim(number_BHN[:, 0] + 1, -1))
    start_B1T = q_pos.start_BT[:, None]

    def hide_others(query: Span, key: Span) -> Tensor:  # by index in the row
        return torch.where(key.pos < query.of(start_B1T), -torch.inf, 0.0)

    return PlacedRule(replace(rule, bias=hide_others), range(start_B1T.shape[2]), number_BHN[:, 0])
