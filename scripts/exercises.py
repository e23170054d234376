"""Four exercises on attention, solved with this package: `python scripts/exercises.py`.

Each function is one solution and returns its numbers; `main` prints them.
"""

import torch
from torch import Tensor

from gptattn.attention import (
    GroupedQueryAttention,
    MultiHeadAttention,
    MultiHeadAttentionWrapper,
    Rule,
    SelfAttentionV1,
    SelfAttentionV2,
    attend,
)
from gptattn.model.cost import parameter_count

SEED = 123
# Six tokens, one per row, with three numbers each.
INPUTS = torch.tensor(
    [
        [0.43, 0.15, 0.89],  # Your
        [0.55, 0.87, 0.66],  # journey
        [0.57, 0.85, 0.64],  # starts
        [0.22, 0.58, 0.33],  # with
        [0.77, 0.25, 0.10],  # one
        [0.05, 0.80, 0.55],  # step
    ]
)
BATCH = torch.stack([INPUTS, INPUTS])


@torch.no_grad()
def same_output_from_both_forms() -> tuple[Tensor, Tensor]:
    """3.1: copy the weights of SelfAttentionV2 to SelfAttentionV1; return both outputs, [6, 2]."""
    torch.manual_seed(SEED)
    v2 = SelfAttentionV2(d_in=3, d_out=2)
    v1 = SelfAttentionV1(d_in=3, d_out=2)
    # A Linear layer stores [d_out, d_in] and multiplies by the transpose.
    v1.W_query.copy_(v2.W_query.weight.T)
    v1.W_key.copy_(v2.W_key.weight.T)
    v1.W_value.copy_(v2.W_value.weight.T)
    return v1(INPUTS), v2(INPUTS)


@torch.no_grad()
def two_dimensional_contexts() -> Tensor:
    """3.2: make two heads return 2 numbers per token together instead of 4; output [2, 6, 2]."""
    torch.manual_seed(SEED)
    wrapper = MultiHeadAttentionWrapper(
        d_in=3,
        d_out=2,  # was 4: the width of all heads together
        context_length=6,
        num_heads=2,
        out_proj=False,
    )
    return wrapper(BATCH)


def gpt2_small_parameters() -> int:
    """3.3: count the parameters of one attention layer of GPT-2 small."""
    attention = MultiHeadAttention(d_in=768, d_out=768, context_length=1024, num_heads=12)
    return parameter_count(attention)


@torch.no_grad()
def grouped_heads() -> tuple[Tensor, Tensor, Tensor]:
    """GQA: 4 query heads share 2 key/value heads; return three equal outputs, [2, 4, 6, 2] each.

    The first repeats each key/value head for its group with `repeat_interleave`, the second with
    `unsqueeze`, `expand` and `reshape`. The third repeats nothing: `attend` handles groups itself.
    """
    torch.manual_seed(SEED)
    gqa = GroupedQueryAttention(d_in=3, d_out=8, context_length=6, num_heads=4, num_kv_heads=2)
    queries, keys, values = gqa.project(BATCH)  # [2, 4, 6, 2], and twice [2, 2, 6, 2]
    group = gqa.num_heads // gqa.num_kv_heads

    def interleaved(x: Tensor) -> Tensor:
        return x.repeat_interleave(group, dim=1)

    def expanded(x: Tensor) -> Tensor:
        batch, heads, tokens, size = x.shape
        x = x.unsqueeze(2).expand(batch, heads, group, tokens, size)
        return x.reshape(batch, heads * group, tokens, size)

    return (
        attend(queries, interleaved(keys), interleaved(values), Rule(gqa.scale)),
        attend(queries, expanded(keys), expanded(values), Rule(gqa.scale)),
        attend(queries, keys, values, Rule(gqa.scale)),
    )


def main() -> None:
    """Print the solutions."""
    torch.set_printoptions(precision=4, sci_mode=False)

    v1, v2 = same_output_from_both_forms()
    print(f"3.1  SelfAttentionV1 with the weights of SelfAttentionV2\n{v1}")
    print(f"     the same as SelfAttentionV2: {torch.allclose(v1, v2)}\n")

    contexts = two_dimensional_contexts()
    print(f"3.2  the wrapper's two heads with d_out=2, first of {len(BATCH)} rows\n{contexts[0]}")
    print(f"     shape: {list(contexts.shape)}\n")

    print(f"3.3  parameters of attention in GPT-2 small: {gpt2_small_parameters():,}\n")

    interleaved, expanded, shared = grouped_heads()
    print(f"GQA  the first of 4 query heads, which share 2 key/value heads\n{interleaved[0, 0]}")
    print(f"     repeat_interleave = expand: {torch.equal(interleaved, expanded)}")
    print(f"     both = no copy at all: {torch.allclose(interleaved, shared)}")


if __name__ == "__main__":
    main()
