"""What a model costs: pure functions of the model, counted from its tensors."""

from dataclasses import dataclass

from torch import nn

from gptattn.model.gpt import GPT


@dataclass(frozen=True)
class Cost:
    """Parameters by role, training FLOPs per token, and cache bytes per token."""

    params: int
    params_attention: int
    params_embedding: int
    flops_per_token: float
    kv_bytes_per_token: float


def parameter_count(module: nn.Module) -> int:
    """Parameters, each shared one counted once."""
    return sum(p.numel() for p in module.parameters())


def measure_cost(model: GPT) -> Cost:
    """The costs of this model; works on the meta device.

    params_embedding: token embedding (which is also the head, if tied) and learned positions.
    flops_per_token: forward and backward (3 x forward), at full context, multiply-adds times two:
    every matrix weight once, the head included, tied or not, and the score and mix work that the
    mask lets through.
    kv_bytes_per_token: all layers, one sequence, averaged over a full context, in the dtype of the
    weights.
    """
    T = model.context_length
    embedding = model.token_embedding.weight.numel()
    if model.input_position is not None:
        embedding += parameter_count(model.input_position)
    attentions = [block.attention for block in model.layers()]
    linear = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    # A head of its own may be a Linear among them.
    matrices = {id(weight): weight.numel() for weight in [*linear, model.head.weight]}
    mix = sum(attention.flops(T, T) for attention in attentions)
    return Cost(
        params=parameter_count(model),
        params_attention=sum(parameter_count(attention) for attention in attentions),
        params_embedding=embedding,
        flops_per_token=3 * (2 * sum(matrices.values()) + mix / T),
        kv_bytes_per_token=model.new_cache(batch=1).nbytes / T,
    )
