"""Projections through latents of low rank, and their sizes, for multi-head latent attention."""

from torch import Tensor, nn

from gptattn.attention.linear import Joint, Linear, Preparable, prepare
from gptattn.attention.norms import wide_rms_norm
from gptattn.position.base import HeadPosition

EPS = 1e-6  # of the norms, as in the authors' code
MOST = 4  # times head_dim that rope_dim may be; the smallest head, of 1, has 4 by default


class WideRMSNorm(nn.RMSNorm):
    """RMSNorm of latents; see `wide_rms_norm`."""

    def forward(self, x: Tensor) -> Tensor:
        return wide_rms_norm(x, self.weight, EPS)


class Latents(nn.Module, Preparable):
    """x [B, T, d_in] -> queries [B, T, H * X], latents [B, T, C] and shared keys [B, T, P].

    X is `query_size`, C is kv_rank and P is `shared`. Queries go through a latent of their own of
    query_rank numbers, unless that is None. Latents go through RMSNorm; no layer has a bias. A rank
    below 1 is a share of `width`. Raises ValueError for ranks that do not fit.

    Source: DeepSeek-V2, arXiv:2405.04434, sec. 2.1.2 and 3.1.2 (the norms).
    """

    def __init__(
        self,
        d_in: int,
        width: int,
        num_heads: int,
        query_size: int,
        shared: int,
        kv_rank: float,
        query_rank: float | None,
    ) -> None:
        super().__init__()
        queries, self.query_rank = num_heads * query_size, None
        self.kv_rank = _rank("kv_rank", kv_rank, width, min(d_in, 2 * width))
        self.sizes = [self.kv_rank, shared]
        if query_rank is None:
            self.W_query = Linear(d_in, queries, bias=False)
        else:
            self.query_rank = _rank("query_rank", query_rank, width, min(d_in, queries))
            self.W_query_down = Linear(d_in, self.query_rank, bias=False)
            self.query_norm = WideRMSNorm(self.query_rank, EPS)
            self.W_query = Linear(self.query_rank, queries, bias=False)
        self.W_latent = Linear(d_in, self.kv_rank + shared, bias=False)
        self.latent_norm = WideRMSNorm(self.kv_rank, EPS)
        self._joint = Joint()

    def _of_input(self) -> tuple[nn.Linear, nn.Linear]:
        """Return the two layers that read x."""
        return self.W_query if self.query_rank is None else self.W_query_down, self.W_latent

    def prepare(self, rows: int | None) -> None:
        self._joint.prepare(self._of_input(), rows)
        if self.query_rank is not None:
            prepare(self.W_query, rows)

    def forward(self, x_BTE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q_BTX, latent_BTX = self._joint(x_BTE, self._of_input())
        if self.query_rank is not None:
            q_BTX = self.W_query(self.query_norm(q_BTX))
        latent_BTC, k_BTP = latent_BTX.split(self.sizes, dim=-1)
        return q_BTX, self.latent_norm(latent_BTC), k_BTP


def _rank(name: str, rank: float, width: int, most: int) -> int:
    """Return the rank; a share of the width is rounded to a multiple of 8 if `most` allows."""
    if isinstance(rank, float) and 0 < rank < 1:
        return min(most, max(8, 8 * round(rank * width / 8)))
    if not (isinstance(rank, int) and 1 <= rank <= most):
        raise ValueError(
            f"{name}={rank} does not fit; give 1 to {most} (more would compress nothing), or a "
            "share of the width below 1"
        )
    return rank


def rope_size(rope_dim: int | None, head_dim: int, position: HeadPosition | None) -> int:
    """Return how many numbers of a key rotate; None: half of a head, a multiple of 4.

    Raises ValueError above 4 head_dim, where the key that all heads share would be nearly all of
    the score; the paper has half of head_dim.
    """
    if position is None or not position.rotates:
        if rope_dim:
            raise ValueError(f"rope_dim={rope_dim} needs position=rope; use that, or null")
        return 0
    if rope_dim is None:
        return max(4, 4 * round(head_dim / 8))
    if rope_dim < 2 or rope_dim % 2:
        raise ValueError(f"rope_dim={rope_dim} must be even, 2 or more, for rotary positions")
    if rope_dim > MOST * head_dim:
        raise ValueError(
            f"rope_dim={rope_dim} is above {MOST} times head_dim={head_dim}; give up to "
            f"{MOST * head_dim}, or null for about half of a head"
        )
    return rope_dim


def resized(position: HeadPosition, rope_dim: int) -> HeadPosition:
    """Return the position for the numbers of a key that rotate; itself if none do.

    Raises ValueError, in terms of rope_dim, if it cannot rotate so many.
    """
    try:
        return position if rope_dim == 0 else position.resized(rope_dim)
    except ValueError as error:
        raise ValueError(str(error).replace("head_dim", "rope_dim")) from error
