# pyright: reportMissingImports=false
"""Builders of other libraries' GPT-2-like models and attention modules, for the benchmarks.

Every language model maps token ids `[B, T]` (int64) to logits `[B, T, V]` (float32); every
attention module maps `[B, T, d_model]` to the same shape, causally. Dropout is 0 throughout.
Each library is imported inside its own builder, so only the peers in use must be installed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class _LogitsOnly(nn.Module):
    """Unwraps the output object of a transformers language model to its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, use_cache=False).logits


class _CausalTorchAttention(nn.Module):
    """`torch.nn.MultiheadAttention` as causal self-attention that returns the output alone."""

    mask: Tensor

    def __init__(self, num_heads: int, d_model: int, context_length: int, bias: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(d_model, num_heads, bias=bias, batch_first=True)
        mask = torch.ones(context_length, context_length, dtype=torch.bool).triu(1)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        mask = self.mask[: x.shape[1], : x.shape[1]]
        # With is_causal=True and need_weights=False, torch drops the mask for fused causal SDPA.
        return self.attention(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]


def build_transformers(
    *,
    num_layers: int,
    num_heads: int,
    d_model: int,
    context_length: int,
    vocab_size: int,
    activation: str = "gelu_pytorch_tanh",
) -> nn.Module:
    """Build transformers' `GPT2LMHeadModel` on SDPA: GPT-2 itself, with a tied head.

    `activation` is the fused tanh GELU. The library's default, "gelu_new", is the same function in
    elementwise steps, which take more time and memory.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=num_layers,
        n_head=num_heads,
        n_embd=d_model,
        n_positions=context_length,
        vocab_size=vocab_size,
        activation_function=activation,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",  # pyright: ignore[reportCallIssue]
    )
    return _LogitsOnly(GPT2LMHeadModel(config))


def build_litgpt(
    *,
    num_layers: int,
    num_heads: int,
    d_model: int,
    context_length: int,
    vocab_size: int,
) -> nn.Module:
    """Build litgpt's `GPT` with GPT-2's pre-norm blocks, biases, tanh GELU and init std of 0.02.

    One difference remains: litgpt has no learned positions. It rotates q and k (RoPE over the whole
    head), and the parameters of a position table are missing. The head is tied as in litgpt's own
    pretraining.
    """
    from litgpt.config import Config
    from litgpt.model import GPT

    config = Config(
        n_layer=num_layers,
        n_head=num_heads,
        n_embd=d_model,
        block_size=context_length,
        vocab_size=vocab_size,
        padded_vocab_size=vocab_size,
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


def build_x_transformers(
    *,
    num_layers: int,
    num_heads: int,
    d_model: int,
    context_length: int,
    vocab_size: int,
) -> nn.Module:
    """Build x-transformers' `TransformerWrapper` around `Decoder` on SDPA, head tied and unscaled.

    Differences from GPT-2: separate q, k and v projections, no bias in attention or LayerNorm,
    learned positions multiplied by `d_model ** -0.5`, and a larger standard deviation at init.
    """
    from x_transformers import Decoder, TransformerWrapper

    decoder = Decoder(
        dim=d_model,
        depth=num_layers,
        heads=num_heads,
        attn_dim_head=d_model // num_heads,
        attn_flash=True,
        ff_mult=4,
        ff_custom_activation=nn.GELU(approximate="tanh"),
    )
    return TransformerWrapper(
        num_tokens=vocab_size,
        max_seq_len=context_length,
        attn_layers=decoder,
        tie_embedding=True,
        tie_embedding_scale=1.0,
    )


def build_llms_from_scratch(
    *,
    num_layers: int,
    num_heads: int,
    d_model: int,
    context_length: int,
    vocab_size: int,
) -> nn.Module:
    """Build llms-from-scratch's `GPTModelFast`: GPT-2 with an untied head, torch's default init."""
    from llms_from_scratch.ch04 import GPTModelFast

    config = {
        "n_layers": num_layers,
        "n_heads": num_heads,
        "emb_dim": d_model,
        "context_length": context_length,
        "vocab_size": vocab_size,
        "drop_rate": 0.0,
        "qkv_bias": True,
    }
    return GPTModelFast(config)


def build_tutorial_head_loop(
    *, num_heads: int, d_model: int, context_length: int, bias: bool = False
) -> nn.Module:
    """Build llms-from-scratch's `MultiHeadAttentionWrapper`: a module per head, no out projection.

    It divides the scores by the root of the head size, as usual, but each head keeps `[T, T]`
    scores and a float mask of its own.
    """
    from llms_from_scratch.ch03 import MultiHeadAttentionWrapper

    head_dim = d_model // num_heads
    return MultiHeadAttentionWrapper(d_model, head_dim, context_length, 0.0, num_heads, bias)


def build_tutorial_explicit(
    *, num_heads: int, d_model: int, context_length: int, bias: bool = False
) -> nn.Module:
    """Build llms-from-scratch's `MultiHeadAttention`: batched heads, explicit scores and softmax.

    `bias` applies to q, k and v; the output projection always has one.
    """
    from llms_from_scratch.ch03 import MultiHeadAttention

    return MultiHeadAttention(d_model, d_model, context_length, 0.0, num_heads, bias)


def build_tutorial_sdpa(
    *, num_heads: int, d_model: int, context_length: int, bias: bool = False
) -> nn.Module:
    """Build llms-from-scratch's `PyTorchMultiHeadAttention`: one q-k-v projection and fused SDPA.

    `bias` applies to q, k and v; the output projection always has one. `context_length` is ignored,
    since there is no mask of that size.
    """
    from llms_from_scratch.ch03 import PyTorchMultiHeadAttention

    return PyTorchMultiHeadAttention(d_model, d_model, num_heads, 0.0, bias)


def build_torch_attention(
    *, num_heads: int, d_model: int, context_length: int, bias: bool = False
) -> nn.Module:
    """Build a causal `torch.nn.MultiheadAttention`; `bias` includes the output projection's."""
    return _CausalTorchAttention(num_heads, d_model, context_length, bias)


LANGUAGE_MODELS: dict[str, Callable[..., nn.Module]] = {
    "transformers": build_transformers,
    "litgpt": build_litgpt,
    "x-transformers": build_x_transformers,
    "llms-from-scratch": build_llms_from_scratch,
}

ATTENTION_MODULES: dict[str, Callable[..., nn.Module]] = {
    "tutorial-head-loop": build_tutorial_head_loop,
    "tutorial-explicit": build_tutorial_explicit,
    "tutorial-sdpa": build_tutorial_sdpa,
    "torch": build_torch_attention,
}
