"""Which of torch's fused kernels computes one call of attention on a GPU."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

# cuDNN's kernel, which torch prefers on Hopper, may round dropout to sixteenths and makes a plan
# for every shape: while decoding, for every token (pytorch#174245, transformers#48163).
WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def gpu_attention(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    scale: float,
    dropout: float = 0.0,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """Return outputs [B, H, T, D of v] from one call of a fused kernel.

    cuDNN's is left to plain causal training, where shapes repeat and nothing is dropped.
    """
    R = q_BHTD.shape[1] // k_BGSD.shape[1]
    if R > 1 and q_BHTD.dtype == torch.float32 and not torch.is_autocast_enabled("cuda"):
        # Flash and cuDNN refuse float32, the efficient kernel refuses enable_gqa: what is left
        # holds T x S scores, which is far more than a copy of keys and values per query head.
        k_BGSD, v_BGSD = (x.repeat_interleave(R, dim=1) for x in (k_BGSD, v_BGSD))
        R = 1
    plain = causal and mask is None and dropout == 0 and torch.is_grad_enabled()
    if plain and not torch.are_deterministic_algorithms_enabled():
        return F.scaled_dot_product_attention(
            q_BHTD, k_BGSD, v_BGSD, is_causal=True, scale=scale, enable_gqa=R > 1
        )
    with sdpa_kernel(WITHOUT_CUDNN):
        return F.scaled_dot_product_attention(
            q_BHTD,
            k_BGSD,
            v_BGSD,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=causal,
            scale=scale,
            enable_gqa=R > 1,
        )
