"""A model's costs, counted from its tensors."""

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
    """Return the number of parameters; shared ones count once."""
    return sum(p.numel() for p in module.parameters())


def measure_cost(model: GPT, scored_share: float = 1.0) -> Cost:
    """Return this model's costs; the model can be on the meta device.

    params_embedding: token embedding (which is also the head, if tied) and learned positions.
    flops_per_token: forward and backward (3 x forward) at full context, with one document per row,
    even if documents are kept apart; a multiply-add counts as two. Counted: each Linear weight
    once, the head included, tied or not; scores and weighted sums of the pairs that the mask allows
    (for a plain module see `attention.foreign`); mechanisms with a state in their training form, in
    chunks. Not counted: norms, activations, softmax, biases, short convolutions before a mechanism,
    the embedding's lookup, and what activation checkpointing recomputes. The head counts only for
    the tokens that are scored, a share `scored_share` of all.
    kv_bytes_per_token: cache of all layers for one row, divided by the context length, in the
    weights' dtype; None if a layer reruns the whole prefix for each token.
    """
    T = model.context_length
    embedding = model.token_embedding.weight.numel()
    if model.input_position is not None:
        embedding += count_parameters(model.input_position)
    attentions = [block.attention for block in model.layers()]
    linear = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    # An untied head is one of the Linear layers already.
    matrices = {id(weight): weight.numel() for weight in [*linear, model.head.weight]}
    # If all are scored, whole numbers stay exact.
    left_out = (1 - scored_share) * model.head.weight.numel()
    mix = sum(attention.flops(T, T) for attention in attentions)
    cached = all(attention.decodes_from_cache for attention in attentions)
    return Cost(
        params=count_parameters(model),
        params_attention=sum(count_parameters(attention) for attention in attentions),
        params_embedding=embedding,
        flops_per_token=3 * (2 * (sum(matrices.values()) - left_out) + mix / T),
        kv_bytes_per_token=model.new_cache(batch=1).nbytes / T if cached else None,
    )


def count_cache(model: GPT, tokens: int | None = None) -> int:
    """Convert model to bfloat16; return one row's cache in bytes, by default at full context."""
    return model.to(torch.bfloat16).new_cache(batch=1, capacity=tokens).nbytes
