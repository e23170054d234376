"""block=llama against transformers' Llama with our weights in it: logits, loss and gradients."""

import pytest
import torch
from building import build_gpt
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from gptattn.model.gpt import GPT

# Their RMSNorm and rotary tables are computed in float32, also in a float64 model.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
# variant, query heads, key/value heads, layers, head size, context, MLP, vocabulary
SIZES = [
    (["attn=mha"], 2, 2, 1, 14, 7, 5, 11),
    (["attn=gqa", "attn.num_kv_heads=3"], 6, 3, 3, 10, 23, 61, 97),
    (["attn=mqa"], 5, 1, 2, 2, 13, 17, 19),
]


def ours(sizes: tuple, *overrides: str) -> GPT:
    variant, heads, _, layers, head_dim, context, inner, vocabulary = sizes
    return build_gpt(
        "block=llama",
        *variant,
        "model.qkv_bias=false",
        f"model.num_heads={heads}",
        f"model.num_layers={layers}",
        f"model.d_model={heads * head_dim}",
        f"model.context_length={context}",
        f"model.d_mlp={inner}",
        *overrides,
        vocab_size=vocabulary,
        std=0.1,
    ).double()


def pairs(model: GPT, llama: LlamaForCausalLM) -> list[tuple[Tensor, Tensor]]:
    """Each parameter of ours with theirs."""
    found = [(model.token_embedding, llama.model.embed_tokens), (model.norm, llama.model.norm)]
    if model.lm_head is not None:
        found.append((model.lm_head, llama.lm_head))
    for mine, layer in zip(model.layers(), llama.model.layers, strict=True):
        attention, theirs = mine.attention, layer.self_attn
        found += [
            (mine.norm_attention, layer.input_layernorm),
            (mine.norm_mlp, layer.post_attention_layernorm),
            (attention.W_query, theirs.q_proj),
            (attention.W_key, theirs.k_proj),
            (attention.W_value, theirs.v_proj),
            (attention.out_proj, theirs.o_proj),
            (mine.mlp.gate, layer.mlp.gate_proj),
            (mine.mlp.up, layer.mlp.up_proj),
            (mine.mlp.down, layer.mlp.down_proj),
        ]
    assert len(found) == len(list(model.parameters())) == len(list(llama.parameters()))
    return [(a.weight, b.weight) for a, b in found]


def in_transformers(model: GPT, sizes: tuple, base: float, eps: float) -> LlamaForCausalLM:
    _, heads, kv_heads, layers, head_dim, context, inner, vocabulary = sizes
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=heads * head_dim,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=context,
        rms_norm_eps=eps,
        rope_theta=base,
        tie_word_embeddings=model.lm_head is None,
        attn_implementation="eager",
    )
    llama = LlamaForCausalLM(config).double()
    with torch.no_grad():
        for mine, theirs in pairs(model, llama):
            theirs.copy_(mine)
    return llama


@pytest.mark.parametrize("sizes", SIZES, ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_block_llama_is_the_llama_of_transformers(sizes, tied):
    base, eps = 500.0, 1e-2  # an epsilon that shows
    overrides = [f"block.tied_head={tied}", f"position.base={base}", f"block.norm_eps={eps}"]
    model = ours(sizes, *overrides)
    llama = in_transformers(model, sizes, base, eps)
    ids = torch.randint(model.vocab_size, (3, model.context_length + 1))
    expected = llama(ids[:, :-1]).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(model(ids[:, :-1]), expected, **CLOSE)
    lost = torch.nn.functional.cross_entropy(expected.flatten(0, 1), ids[:, 1:].flatten())
    mine = model.loss(ids[:, :-1], ids[:, 1:], chunk_tokens=5)
    torch.testing.assert_close(mine, lost, **CLOSE)
    lost.backward()
    mine.backward()
    for parameter, theirs in pairs(model, llama):
        assert theirs.grad.abs().max() > 1e-4
        torch.testing.assert_close(parameter.grad, theirs.grad, **CLOSE)
