# pyright: reportMissingImports=false
"""Builders for other libraries' GPT-2-like models and attention modules, as points of comparison.

Every language model maps token ids ``[B, T]`` (int64) to logits ``[B, T, V]`` (float32); every
attention module maps ``[B, T, d_model]`` to the same shape, causally. Dropout is 0 throughout.
Each library is imported inside its own builder, so only the peers in use need be installed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _LogitsOnly(nn.Module):
    """Unwraps the output object of a transformers language model to its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, use_cache=False).logits


class _CausalTorchAttention(nn.Module):
    """``torch.nn.MultiheadAttention`` as causal self-attention that returns the output alone."""

    mask: Tensor

    def __init__(self, num_heads: int, d_model: int, context_length: int, bias: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(d_model, num_heads, bias=bias, batch_first=True)
        mask = torch.ones(context_length, context_length, dtype=torch.bool).triu(1)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        mask = self.mask[: x.shape[1], : x.shape[1]]
        # With is_causal and without weights, torch drops the mask and calls fused causal SDPA.
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
    """transformers ``GPT2LMHeadModel`` on SDPA: GPT-2 itself, head tied.

    ``activation`` is the fused tanh GELU; the library's default, "gelu_new", is the same function
    written out in elementwise steps, slower and heavier.
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
    """litgpt ``GPT``: GPT-2's pre-norm blocks, biases, tanh GELU and initial spread of 0.02.

    One difference remains: litgpt has no learned positions, so q and k are rotated (RoPE over the
    whole head) and the position table is missing from the parameters. The head is tied as
    litgpt's own pretraining does it.
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
    """x-transformers ``TransformerWrapper`` around ``Decoder`` on SDPA, head tied and unscaled.

    Differences from GPT-2: separate q, k and v projections, no bias in attention or LayerNorm,
    learned positions multiplied by ``d_model ** -0.5``, and a larger initial spread.
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
    """llms-from-scratch ``GPTModelFast``: GPT-2 with an untied head and torch's default init."""
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
    """llms-from-scratch ``MultiHeadAttentionWrapper``: one module per head, no output projection.

    It divides the scores by the root of the head size, as usual, but keeps each head's ``[T, T]``
    scores and its own float mask.
    """
    from llms_from_scratch.ch03 import MultiHeadAttentionWrapper

    head_dim = d_model // num_heads
    return MultiHeadAttentionWrapper(d_model, head_dim, context_length, 0.0, num_heads, bias)


def build_tutorial_explicit(
    *, num_heads: int, d_model: int, context_length: int, bias: bool = False
) -> nn.Module:
    """llms-from-scratch ``MultiHeadAttention``: batched heads, scores and softmax written out.

    ``bias`` is that of q, k and v; the output projection always has one.
    """
    from llms_from_scratch.ch03 import MultiHeadAttention

    return MultiHeadAttention(d_model, d_model, context_length, 0.0, num_heads, bias)


def build_tutorial_sdpa(
    *, num_heads: int, d_model: int, context_length: int, bias: bool = False
) -> nn.Module:
    """llms-from-scratch ``PyTorchMultiHeadAttention``: one q-k-v projection and fused SDPA.

    ``bias`` is that of q, k and v; the output projection always has one. There is no mask to
    size, so ``context_length`` is ignored.
    """
    from llms_from_scratch.ch03 import PyTorchMultiHeadAttention

    return PyTorchMultiHeadAttention(d_model, d_model, num_heads, 0.0, bias)


def build_torch_attention(
    *, num_heads: int, d_model: int, context_length: int, bias: bool = False
) -> nn.Module:
    """``torch.nn.MultiheadAttention``, causal; ``bias`` covers the output projection as well."""
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


def parameter_count(model: nn.Module) -> int:
    """Number of trainable values, a tied tensor counted once."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, targets: Tensor
) -> float:
    """One plain step (forward, cross-entropy, backward, update); returns the loss before it."""
    logits = model(tokens)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def check_language_model(
    name: str,
    *,
    num_layers: int = 4,
    num_heads: int = 4,
    d_model: int = 128,
    context_length: int = 64,
    vocab_size: int = 256,
    batch_size: int = 12,
) -> tuple[float, float]:
    """Builds a peer, tests logits and causality, takes one AdamW step; returns losses around it."""
    model = LANGUAGE_MODELS[name](
        num_layers=num_layers,
        num_heads=num_heads,
        d_model=d_model,
        context_length=context_length,
        vocab_size=vocab_size,
    )
    tokens = torch.randint(vocab_size, (batch_size, context_length + 1))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]

    half = context_length // 2
    changed = torch.cat([inputs[:, :half], inputs[:, half:].flip(1)], dim=1)
    with torch.no_grad():
        logits, logits_changed = model(inputs), model(changed)
    if logits.shape != (*inputs.shape, vocab_size) or logits.dtype != torch.float32:
        raise AssertionError(f"{name}: logits are {tuple(logits.shape)} of {logits.dtype}")
    torch.testing.assert_close(logits[:, :half], logits_changed[:, :half], rtol=1e-4, atol=1e-4)

    before = {key: value.detach().clone() for key, value in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    first = train_step(model, optimizer, inputs, targets)
    unmoved = [key for key, value in model.named_parameters() if torch.equal(value, before[key])]
    if unmoved:
        raise AssertionError(f"{name}: one step left these as they were: {unmoved}")
    with torch.no_grad():
        second = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).item()
    if not second < first:
        raise AssertionError(f"{name}: the loss did not fall: {first} then {second}")
    return first, second


def check_attention_module(
    name: str,
    *,
    num_heads: int = 4,
    d_model: int = 128,
    context_length: int = 64,
    batch_size: int = 2,
) -> None:
    """Builds an attention module, tests shape, causality and that every parameter gets a grad."""
    module = ATTENTION_MODULES[name](
        num_heads=num_heads, d_model=d_model, context_length=context_length
    )
    x = torch.randn(batch_size, context_length, d_model)
    half = context_length // 2
    changed = torch.cat([x[:, :half], torch.randn_like(x[:, half:])], dim=1)
    out, out_changed = module(x), module(changed)
    if out.shape != x.shape:
        raise AssertionError(f"{name}: output is {tuple(out.shape)}")
    torch.testing.assert_close(out[:, :half], out_changed[:, :half], rtol=1e-4, atol=1e-5)
    out.square().mean().backward()
    missing = [key for key, value in module.named_parameters() if value.grad is None]
    if missing:
        raise AssertionError(f"{name}: no gradient for {missing}")


def main() -> None:
    """Checks every peer at the small size."""
    torch.manual_seed(0)
    for name in LANGUAGE_MODELS:
        first, second = check_language_model(name)
        print(f"{name}: loss {first:.4f}, after one step {second:.4f}")
    for name in ATTENTION_MODULES:
        check_attention_module(name)
        print(f"{name}: ok")


if __name__ == "__main__":
    main()
