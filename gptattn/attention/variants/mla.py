"""Multi-head latent attention: keys and values of all heads come from one small latent per token.

Letters besides those in `base.py`: C numbers of a latent, P of a rotated key, X = D + P or C + P.
"""

from collections.abc import Mapping
from typing import Unpack

import torch
from torch import Tensor, einsum, nn

from gptattn.attention.base import Shared, check_sizes, rank_of
from gptattn.attention.cache import Entry
from gptattn.attention.linear import Linear
from gptattn.attention.softmax import (
    Heads,
    PlacedRule,
    SoftmaxAttention,
    SoftmaxOptions,
    seen_pairs,
    split_heads,
    wide_rms_norm,
)
from gptattn.position.base import HeadPosition

EPS = 1e-6  # in the norms, as in the authors' code


class MultiHeadLatentAttention(SoftmaxAttention):
    """The cache holds a latent of kv_rank numbers and a rotated key of rope_dim, for all heads.

    x [B, T, d_in] -> y [B, T, d_out]. A head's queries and keys have D numbers without a position
    and P = rope_dim that rotate; all heads share the key's P. rope_dim=None: with rotary positions,
    about half of a head, a multiple of 4; without them, 0. A rank below 1 is a share of d_out;
    query_rank=None: queries of full rank. Raises ValueError for impossible sizes, ranks and
    rope_dim.

    All weights are drawn with one std, as in DeepSeek-V3 (0.006, arXiv:2412.19437, sec. 4.2; here
    the model's), and the norms' gains start at 1. `position.stretch` scales only the rotated part
    of a score, as YaRN itself does; DeepSeek's models scale the whole score. V2's sec. 3.1.2 has
    scaling factors; like DeepSeek's released code, this leaves them out.

    Source: DeepSeek-V2, arXiv:2405.04434, sec. 2.1, 3.1.2 (the norms of latents) and appendix C.
    """

    keeps_heads = False

    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int,
        num_heads: int,
        *,
        kv_rank: float = 0.3333,
        query_rank: float | None = 0.6667,
        rope_dim: float | None = None,
        out_bias: bool = True,
        **options: Unpack[SoftmaxOptions],
    ) -> None:
        check_sizes(d_out, num_heads, num_heads)  # before dividing
        position = options.get("position")
        D, P = d_out // num_heads, rope_size(rope_dim, d_out // num_heads, position)
        if options.get("scale") is None:
            options["scale"] = (D + P) ** -0.5
        if position is not None:
            options["position"] = position.resized(P) if P else position
        super().__init__(d_in, d_out, context_length, num_heads, num_heads, **options)
        queries = num_heads * (D + P)
        self.rope_dim, self.kv_rank = P, rank_of("kv_rank", kv_rank, d_out, min(d_in, 2 * d_out))
        self.query_rank: int | None = None
        if query_rank is None:
            self.W_query = Linear(d_in, queries, bias=False)
        else:
            self.query_rank = rank_of("query_rank", query_rank, d_out, min(d_in, queries))
            self.W_query_down = Linear(d_in, self.query_rank, bias=False)
            self.query_norm = nn.RMSNorm(self.query_rank, EPS)
            self.W_query = Linear(self.query_rank, queries, bias=False)
        self.W_latent = Linear(d_in, self.kv_rank + P, bias=False)
        self.latent_norm = nn.RMSNorm(self.kv_rank, EPS)
        # Plain layers: decoding reads their weights and doesn't call them, so none is prepared.
        self.W_key = nn.Linear(self.kv_rank, d_out, bias=False)
        self.W_value = nn.Linear(self.kv_rank, d_out, bias=False)
        self.out_proj = Linear(d_out, d_out, bias=out_bias)

    def project(self, x_BTE: Tensor) -> Heads:
        """Return queries [B, H, T, D + P], latents [B, 1, T, C] and shared keys [B, 1, T, P]."""
        return self._project(x_BTE, self.query_source(x_BTE))

    def query_source(self, x_BTE: Tensor) -> Tensor:
        """Return the input of the queries' projection: their latent, normed, or x at full rank."""
        if self.query_rank is None:
            return x_BTE
        return wide_rms_norm(self.W_query_down(x_BTE), self.query_norm.weight, EPS)

    def _project(self, x_BTE: Tensor, source_BTC: Tensor) -> Heads:
        q_BTX = self.W_query(source_BTC)
        latent_BTC, k_BTP = self.W_latent(x_BTE).split([self.kv_rank, self.rope_dim], dim=-1)
        latent_BTC = wide_rms_norm(latent_BTC, self.latent_norm.weight, EPS)
        return split_heads(q_BTX, self.num_heads), latent_BTC.unsqueeze(1), k_BTP.unsqueeze(1)

    def entries(self, x_BTE: Tensor, shared: Shared) -> tuple[Tensor, dict[str, Tensor]]:
        return self.entries_from(x_BTE, self.query_source(x_BTE), shared)

    def entries_from(
        self, x_BTE: Tensor, source_BTC: Tensor, shared: Shared
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return `entries`, with queries from the result of `query_source`."""
        q_BHTX, latent_B1TC, k_B1TP = self._project(x_BTE, source_BTC)
        if self.position is not None and self.rope_dim > 0:
            q_BHTD, q_BHTP = q_BHTX.split([self.head_dim, self.rope_dim], dim=-1)
            q_BHTP, k_B1TP = self.position.rotate(q_BHTP, k_B1TP, shared.positions)
            q_BHTX = torch.cat([q_BHTD, q_BHTP], dim=-1)
        return q_BHTX, {"latent": torch.cat([latent_B1TC, k_B1TP], dim=-1)}

    def cached(self) -> dict[str, Entry]:
        return {"latent": Entry(1, self.kv_rank + self.rope_dim)}

    def keys(self, held: Mapping[str, Tensor]) -> Tensor:
        latent_B1SC, k_B1SP = held["latent"].split([self.kv_rank, self.rope_dim], dim=-1)
        k_BHSD = split_heads(self.W_key(latent_B1SC.squeeze(1)), self.num_heads)
        return torch.cat([k_BHSD, k_B1SP.expand(-1, self.num_heads, -1, -1)], dim=-1)

    def attend(self, q_BHTD: Tensor, held: Mapping[str, Tensor], placed: PlacedRule) -> Tensor:
        latent_B1SX, C = held["latent"], self.kv_rank
        if not self.absorbs(q_BHTD.shape[2], latent_B1SX.shape[2]):
            v_BHSD = split_heads(self.W_value(latent_B1SX[:, 0, :, :C]), self.num_heads)
            return self.mix(q_BHTD, self.keys(held), v_BHSD, placed)
        q_BHTD, q_BHTP = q_BHTD.split([self.head_dim, self.rope_dim], dim=-1)
        # q (W c) = (q W) c: W_key goes into the query, and W_value into the output.
        q_BHTC = einsum("BHTD,HDC->BHTC", q_BHTD, self._by_head(self.W_key))
        # The whole entry is also the value, because fused attention wants one size; copying its
        # first C numbers would cost more than the P extra sums.
        q_BHTX = torch.cat([q_BHTC, q_BHTP], dim=-1)
        y_BHTX = self.mix(q_BHTX, latent_B1SX, latent_B1SX, placed)
        return einsum("BHTC,HDC->BHTD", y_BHTX[..., :C], self._by_head(self.W_value))

    def absorbs(self, T: int, S: int) -> bool:
        """Whether T queries attend to the S latents directly, not to keys and values made of them.

        Both give the same outputs. This picks the one with fewer multiply-adds per head: latents
        need scores and sums over C numbers, not D; the other form must project S tokens, not T.
        With T = S, as in training, it is always the other form.
        """
        C, D = self.kv_rank, self.head_dim
        return T < S and T * C * (D + S) < S * D * (C + T)

    def _by_head(self, up: nn.Linear) -> Tensor:
        return up.weight.view(self.num_heads, self.head_dim, self.kv_rank)

    def flops(self, T: int, S: int) -> int:
        C, D, P = self.kv_rank, self.head_dim, self.rope_dim
        pairs = self.num_heads * seen_pairs(T, S, self.rule())
        if self.absorbs(T, S):
            return 2 * 2 * (C + P) * pairs
        # The weights' count covers T tokens' keys and values; cached tokens' are made again.
        return 2 * (2 * D + P) * pairs + 2 * 2 * (S - T) * C * self.d_out


def rope_size(rope_dim: float | None, head_dim: int, position: HeadPosition | None) -> int:
    """Return how many numbers of a key all heads share; a share of D rounds to a multiple of 4."""
    if rope_dim is None:
        if position is None or not position.rotates:
            return 0
        rope_dim = 0.5
    if isinstance(rope_dim, float) and 0 < rope_dim < 1:
        return max(4, 4 * round(rope_dim * head_dim / 4))
    if not isinstance(rope_dim, int) or rope_dim < 2 or rope_dim % 2:
        raise ValueError(
            f"rope_dim={rope_dim} must be an even number for rotary positions, 2 or more, or, "
            "below 1, a share of a head"
        )
    return rope_dim
