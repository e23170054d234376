"""Multi-head latent attention: keys and values of all heads come from one small latent per token.

Letters besides those in `base.py`: C numbers of a latent, P of a rotated key, X = D + P or C + P.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, einsum, nn

from gptattn.attention.base import Carried, check_sizes
from gptattn.attention.cache import Cache
from gptattn.attention.core import Backend
from gptattn.attention.heads import seen_pairs
from gptattn.attention.latents import Latents, resized, rope_size
from gptattn.attention.linear import Linear
from gptattn.attention.rule import Rule
from gptattn.attention.softmax import Heads, SoftmaxAttention
from gptattn.attention.token_cache import Entry
from gptattn.position.base import HeadPosition, Positions


class MultiHeadLatentAttention(SoftmaxAttention):
    """The cache holds a latent of kv_rank numbers and a rotated key of rope_dim, for all heads.

    x [B, T, d_in] -> y [B, T, d_out]. A head's queries and keys have D numbers without a position
    and P = rope_dim that rotate, of which all heads share the key's. Without rotary positions P is
    0. A rank below 1 is a share of d_out; query_rank=None: queries of full rank. Raises ValueError
    for impossible sizes, ranks and rope_dim.

    Weights are drawn with one std for all, as DeepSeek-V3 draws them (0.006, arXiv:2412.19437,
    sec. 4.2; here the model's), and the norms' gains are 1. `position.stretch` scales only the
    rotated part of a score, as YaRN does by itself; DeepSeek's models then scale all of it.

    Source: DeepSeek-V2, arXiv:2405.04434, sec. 2.1 and appendix C.
    """

    keeps_heads = False

    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int,
        num_heads: int,
        dropout: float = 0.0,
        kv_rank: float = 0.3333,
        query_rank: float | None = 0.6667,
        rope_dim: int | None = None,
        out_bias: bool = True,
        scale: float | None = None,
        window: float | None = None,
        backend: Backend = "sdpa",
        position: HeadPosition | None = None,
    ) -> None:
        check_sizes(d_out, num_heads, num_heads, dropout)  # before one divides another
        D, P = d_out // num_heads, rope_size(rope_dim, d_out // num_heads, position)
        super().__init__(
            d_in=d_in,
            d_out=d_out,
            context_length=context_length,
            num_heads=num_heads,
            num_kv_heads=num_heads,
            dropout=dropout,
            scale=(D + P) ** -0.5 if scale is None else scale,
            window=window,
            backend=backend,
            position=None if position is None else resized(position, P),
        )
        self.latents = Latents(d_in, d_out, num_heads, D + P, P, kv_rank, query_rank)
        self.kv_rank, self.rope_dim = self.latents.kv_rank, P
        # Plain layers: decoding reads their weights without calling them, so it prepares none.
        self.W_key = nn.Linear(self.kv_rank, d_out, bias=False)
        self.W_value = nn.Linear(self.kv_rank, d_out, bias=False)
        self.out_proj = Linear(d_out, d_out, bias=out_bias)

    def project(self, x_BTE: Tensor) -> Heads:
        """Return queries [B, H, T, D + P], latents [B, 1, T, C] and shared keys [B, 1, T, P]."""
        q_BTX, latent_BTC, k_BTP = self.latents(x_BTE)
        return self._per_head(q_BTX), latent_BTC.unsqueeze(1), k_BTP.unsqueeze(1)

    def located(self, x_BTE: Tensor, carried: Carried) -> Heads:
        """Return the result of `project`, with the last P numbers of queries and keys rotated."""
        q_BHTX, latent_B1TC, k_B1TP = self.project(x_BTE)
        if self.position is not None and self.rope_dim > 0:
            q_BHTD, q_BHTP = q_BHTX.split([self.head_dim, self.rope_dim], dim=-1)
            q_BHTP, k_B1TP = self.position.rotate(q_BHTP, k_B1TP, carried.positions)
            q_BHTX = torch.cat([q_BHTD, q_BHTP], dim=-1)
        return q_BHTX, latent_B1TC, k_B1TP

    def entries(
        self, x_BTE: Tensor, cache: Cache | None, carried: Carried
    ) -> tuple[Tensor, dict[str, Tensor]]:
        q_BHTX, *shared = self.located(x_BTE, carried)
        latent_B1TX = torch.cat(shared, dim=-1)
        return q_BHTX, {"latent": latent_B1TX} | self.entries_of_parts(x_BTE, cache)

    def kept(self) -> dict[str, Entry]:
        return {"latent": Entry(1, self.kv_rank + self.rope_dim)} | self.kept_by_parts()

    def keys(self, held: Mapping[str, Tensor]) -> Tensor:
        latent_B1SC, k_B1SP = held["latent"].split([self.kv_rank, self.rope_dim], dim=-1)
        k_BHSD = self._per_head(self.W_key(latent_B1SC.squeeze(1)))
        return torch.cat([k_BHSD, k_B1SP.expand(-1, self.num_heads, -1, -1)], dim=-1)

    def attend(
        self,
        q_BHTD: Tensor,
        held: Mapping[str, Tensor],
        rule: Rule,
        q_pos: Positions,
        k_pos: Positions,
    ) -> Tensor:
        latent_B1SX, C = held["latent"], self.kv_rank
        if not self.absorbs(q_BHTD.shape[2], latent_B1SX.shape[2]):
            v_BHSD = self._per_head(self.W_value(latent_B1SX[:, 0, :, :C]))
            return self.mixed(q_BHTD, self.keys(held), v_BHSD, rule, q_pos, k_pos)
        q_BHTD, q_BHTP = q_BHTD.split([self.head_dim, self.rope_dim], dim=-1)
        # q (W c) = (q W) c: W_key goes into the query, and W_value into the output.
        q_BHTC = einsum("BHTD,HDC->BHTC", q_BHTD, self._by_head(self.W_key))
        # The whole entry is the value too, because fused attention wants one size; a copy of its
        # first C numbers would cost more than the P further sums.
        q_BHTX = torch.cat([q_BHTC, q_BHTP], dim=-1)
        y_BHTX = self.mixed(q_BHTX, latent_B1SX, latent_B1SX, rule, q_pos, k_pos)
        return einsum("BHTC,HDC->BHTD", y_BHTX[..., :C], self._by_head(self.W_value))

    def absorbs(self, T: int, S: int) -> bool:
        """Whether T queries attend to S latents themselves, not to keys and values made of them.

        Both give the same outputs. This takes the one with fewer multiply-adds per head: scores and
        sums over C instead of D numbers, or keys and values of S tokens instead of T. T = S, as in
        training, always makes keys and values.
        """
        C, D = self.kv_rank, self.head_dim
        return T < S and T * C * (D + S) < S * D * (C + T)

    def _by_head(self, up: nn.Linear) -> Tensor:
        return up.weight.view(self.num_heads, self.head_dim, self.kv_rank)

    def _per_head(self, x_BTX: Tensor) -> Tensor:
        return x_BTX.unflatten(2, (self.num_heads, -1)).transpose(1, 2)

    def flops(self, T: int, S: int) -> int:
        pairs = seen_pairs(T, S, self.rule().window)  # in the form that the model trains with
        return 2 * (2 * self.head_dim + self.rope_dim) * self.num_heads * pairs
