# pyright: reportMissingImports=false
"""Other libraries' GPT-2-like models and attention modules.

Every language model maps token ids `[B, T]` (int64) to logits `[B, T, V]` (float32); every
attention module maps `[B, T, width]` to the same shape, causally. Dropout is 0 throughout.
Each library is imported inside its own builder, so only the peers in use must be installed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Sizes:
    """The sizes of a language model."""

    num_layers: int
    num_heads: int
    d_model: int
    context_length: int
    vocab_size: int


def build_transformers(sizes: Sizes) -> LogitsOnly:
    """Build transformers' `GPT2LMHeadModel` on SDPA: GPT-2 itself, with a tied head.

    Its activation is the fused tanh GELU. The library's default, "gelu_new", computes the same
    function in elementwise steps, which take more time and memory.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=sizes.num_layers,
        n_head=sizes.num_heads,
        n_embd=sizes.d_model,
        n_positions=sizes.context_length,
        vocab_size=sizes.vocab_size,
        activation_function="gelu_pytorch_tanh",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",  # pyright: ignore[reportCallIssue]
    )
    return LogitsOnly(GPT2LMHeadModel(config))


class LogitsOnly(nn.Module):
    """Unwraps the output object of a transformers language model to its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, use_cache=False).logits


def build_litgpt(sizes: Sizes) -> nn.Module:
    """Build litgpt's `GPT` with GPT-2's pre-norm blocks, biases, tanh GELU and init std of 0.02.

    One difference remains: litgpt has no learned positions, and so no position table. It rotates q
    and k instead (RoPE over the whole head). The head is tied as in litgpt's own pretraining.
    """
    from litgpt.config import Config
    from litgpt.model import GPT

    config = Config(
        n_layer=sizes.num_layers,
        n_head=sizes.num_heads,
        n_embd=sizes.d_model,
        block_size=sizes.context_length,
        vocab_size=sizes.vocab_size,
        padded_vocab_size=sizes.vocab_size,
        norm_class_name="LayerNorm",
        mlp_class_name="GptNeoxMLP",
        gelu_approximate="tanh",
        bias=True,
        lm_head_bias=False,
        parallel_residual=False,
        rotary_percentage=1.0,
    )
    model = GPT(config)
    model.apply(model._init_weights)
    model.transformer.wte.weight = model.lm_head.weight
    return model


def build_x_transformers(sizes: Sizes) -> nn.Module:
    """Build x-transformers' `TransformerWrapper` around `Decoder` on SDPA, head tied and unscaled.

    Differences from GPT-2: separate q, k and v projections, no bias in attention or LayerNorm,
    learned positions multiplied by `d_model ** -0.5`, and a larger standard deviation at init.
    """
    from x_transformers import Decoder, TransformerWrapper

    decoder = Decoder(
        dim=sizes.d_model,
        depth=sizes.num_layers,
        heads=sizes.num_heads,
        attn_dim_head=sizes.d_model // sizes.num_heads,
        attn_flash=True,
        ff_mult=4,
        ff_custom_activation=nn.GELU(approximate="tanh"),
    )
    return TransformerWrapper(
        num_tokens=sizes.vocab_size,
        max_seq_len=sizes.context_length,
        attn_layers=decoder,
        tie_embedding=True,
        tie_embedding_scale=1.0,
    )


def build_llms_from_scratch(sizes: Sizes) -> nn.Module:
    """Build llms-from-scratch's `GPTModelFast`: GPT-2 with an untied head, torch's default init."""
    from llms_from_scratch.ch04 import GPTModelFast

    config = {
        "n_layers": sizes.num_layers,
        "n_heads": sizes.num_heads,
        "emb_dim": sizes.d_model,
        "context_length": sizes.context_length,
        "vocab_size": sizes.vocab_size,
        "drop_rate": 0.0,
        "qkv_bias": True,
    }
    return GPTModelFast(config)


class PlainBlock(nn.Module):
    """A pre-norm block with one q-k-v projection and torch's fused causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm, self.heads = nn.LayerNorm(width), heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        up, down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), up, nn.GELU(approximate="tanh"), down)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1))
        y = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class PlainGPT(nn.Module):
    """GPT-2 with a tied head in a few lines, like nanoGPT."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocab_size, sizes.d_model)
        self.positions = nn.Embedding(sizes.context_length, sizes.d_model)
        blocks = (PlainBlock(sizes.d_model, sizes.num_heads) for _ in range(sizes.num_layers))
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(sizes.d_model)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        index = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.blocks(self.tokens(tokens) + self.positions(index))
        return F.linear(self.norm(x), self.tokens.weight)


def build_tutorial(name: str, width: int, heads: int, length: int) -> nn.Module:
    """Build an attention of llms-from-scratch; all but the wrapper have a biased out projection.

    The wrapper has a module per head, each with its own `[T, T]` scores and float mask. The others
    batch the heads: one with explicit scores and softmax, one with a q-k-v projection and SDPA.
    """
    from llms_from_scratch import ch03

    sizes = {
        "MultiHeadAttentionWrapper": (width, width // heads, length, 0.0, heads),
        "MultiHeadAttention": (width, width, length, 0.0, heads),
        "PyTorchMultiHeadAttention": (width, width, heads, 0.0),
    }
    return getattr(ch03, name)(*sizes[name])


class TorchAttention(nn.Module):
    """`torch.nn.MultiheadAttention` without biases, as causal self-attention."""

    mask: Tensor

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, bias=False, batch_first=True)
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        mask = self.mask[: x.shape[1], : x.shape[1]]
        # With is_causal=True and need_weights=False, torch drops the mask for fused causal SDPA.
        return self.attention(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]


LANGUAGE_MODELS: dict[str, Callable[[Sizes], nn.Module]] = {
    "plain": PlainGPT,
    "transformers": build_transformers,
    "litgpt": build_litgpt,
    "x-transformers": build_x_transformers,
    "llms-from-scratch": build_llms_from_scratch,
}

ATTENTION_MODULES: dict[str, Callable[[int, int, int], nn.Module]] = {
    "tutorial-head-loop": partial(build_tutorial, "MultiHeadAttentionWrapper"),
    "tutorial-explicit": partial(build_tutorial, "MultiHeadAttention"),
    "tutorial-sdpa": partial(build_tutorial, "PyTorchMultiHeadAttention"),
    "torch": TorchAttention,
}
