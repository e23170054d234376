"""The costs of a model: pure functions of it, counted from its tensors."""

from dataclasses import dataclass

import torch
from torch import nn

from gptattn.model.gpt import GPT


@dataclass(frozen=True)
class Cost:
    """Parameters by role, training FLOPs per token, cache bytes per token; see `measure_cost`."""

    params: int
    params_attention: int
    params_embedding: int
    flops_per_token: float
    kv_bytes_per_token: float | None


def count_parameters(module: nn.Module) -> int:
    """Return the number of parameters; a shared one counts once."""
    return sum(p.numel() for p in module.parameters())


def measure_cost(model: GPT, scored: float = 1.0) -> Cost:
    """Return the costs of this model; it may be on the meta device.

    params_embedding: token embedding (which is also the head, if tied) and learned positions.
    flops_per_token: forward and backward (3 x forward) at full context, for rows of one document
    each, even if documents are kept apart; a multiply-add counts as two. It counts each Linear
    weight once, including the head, tied or not, and the scores and weighted sums of the pairs that
    the mask allows (of a plain module see `attention.foreign`); what carries a state counts in the
    form that trains it, in chunks. Norms, activations, softmax, biases, short convolutions, the
    embedding's lookup and what activation checkpointing computes again are not counted. If only a
    share of the tokens is `scored`, the head counts only there.
    kv_bytes_per_token: cache of all layers for one row, divided by the context length, in the dtype
    of the weights; None if a layer has none and reads the whole prefix again.
    """
    T = model.context_length
    embedding = model.token_embedding.weight.numel()
    if model.input_position is not None:
        embedding += count_parameters(model.input_position)
    attentions = [block.attention for block in model.layers()]
    linear = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    # An untied head may be one of the Linear layers already.
    matrices = {id(weight): weight.numel() for weight in [*linear, model.head.weight]}
    # If all are scored, whole numbers stay exact.
    left_out = (1 - scored) * model.head.weight.numel()
    mix = sum(attention.flops(T, T) for attention in attentions)
    cached = all(attention.decodes_from_cache for attention in attentions)
    return Cost(
        params=count_parameters(model),
        params_attention=sum(count_parameters(attention) for attention in attentions),
        params_embedding=embedding,
        flops_per_token=3 * (2 * (sum(matrices.values()) - left_out) + mix / T),
        kv_bytes_per_token=model.new_cache(batch=1).nbytes / T if cached else None,
    )


def estimate_training_bytes(model: GPT, tokens: int, dtype: torch.dtype) -> int:
    """Return about the bytes that training on `tokens` at a time takes at the least.

    `dtype`: of matrix products. Of a block, what its Linear layers read and write stands for what
    is kept: right to a tenth for softmax attention; with a state it may be three times as much.
    """
    linear = ([m for m in b.modules() if isinstance(m, nn.Linear)] for b in model.layers())
    kept = [sum(m.in_features + m.out_features for m in of_block) for of_block in linear]
    if model.activation_checkpointing:  # one block at a time, and what enters each
        kept = [max(kept), len(kept) * model.token_embedding.embedding_dim]
    weights = sum(p.nbytes for p in model.parameters())  # and gradients, and AdamW's averages
    return 4 * weights + tokens * sum(kept) * dtype.itemsize


def count_cache(model: GPT, tokens: int | None = None) -> int:
    """Return the bytes of one row's cache in half precision, by default for the whole context."""
    return model.to(torch.bfloat16).new_cache(batch=1, capacity=tokens).nbytes
