"""The families of Hugging Face checkpoints that we read, each a table; we write three of them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gptattn.settings.compose import settings
from gptattn.settings.config import TrainConfig

HEAD = "lm_head"  # the same name in all families, without a prefix


@dataclass(frozen=True)
class Family:
    """A family of models, such as GPT-2.

    If several of our modules share a name in `names`, that tensor is ours concatenated. A value of
    `defaults` or `required` can be a function of the other keys of config.json.
    """

    name: str  # `model_type` in config.json
    architecture: str  # the class in transformers
    fixed: dict[str, Any]  # the settings that all its models share
    settings: dict[str, str]  # other settings: ours -> the key in config.json
    defaults: dict[str, Any]  # what a missing key means
    accepted: dict[str, tuple[Any, ...]]  # allowed values of other keys; we write the first
    names: dict[str, str]  # our module, or one parameter of it -> theirs; N is the layer's number
    prefix: str  # of all names except the head's, in what we write and most files
    skipped: tuple[str, ...]  # suffixes of names that we do not read
    required: dict[str, Any]  # the only allowed values of keys that we do not write
    transposed: tuple[str, ...] = ()  # prefixes of matrices stored transposed

    def read_values(self, node: Mapping[str, Any]) -> dict[str, Any]:
        """Return our settings in a config.json. Raises ValueError or KeyError for another model."""
        # transformers 5 writes `rope_parameters`; earlier versions `rope_theta` and `rope_scaling`.
        rope = {**(node.get("rope_scaling") or {}), **(node.get("rope_parameters") or {})}
        rope = {key: value for key, value in rope.items() if key in ROTARY}
        given = {key: one for key, one in [*node.items(), *rope.items()] if one is not None}
        given = _evaluate(self.defaults, given) | given
        only = {key: (value,) for key, value in _evaluate(self.required, given).items()}
        only["is_causal"] = (True,)  # their attention reads it from the config, if it is there
        for key, allowed in (self.accepted | only).items():
            if given.get(key, allowed[0]) not in allowed:
                raise ValueError(f"{key} is {given[key]!r:.60}, but must be {allowed[0]!r:.60}")
        for key in self.settings.values():
            if not isinstance(given[key], int | float):
                raise ValueError(f"{key} is {given[key]!r:.60}, but must be a number or a bool")
        return {ours: given[key] for ours, key in self.settings.items()}

    def make_settings(self, values: Mapping[str, Any], tokenizer: list[str]) -> TrainConfig:
        """Return the settings for these values. Raises ConfigError, like `compose.settings`.

        `tokenizer`: the overrides that choose it.
        """
        chosen = {**self.fixed, **values}
        if "recipe" not in chosen:
            heads = chosen.pop("attn.num_kv_heads", None)
            grouped = heads not in (None, values["model.num_heads"])
            chosen |= {"attn": "gqa", "attn.num_kv_heads": heads} if grouped else {"attn": "mha"}
        return settings([*as_overrides(chosen), *tokenizer])

    def rename(self, ours: str) -> str:
        """Return the name of their tensor that holds our parameter."""
        key = re.sub(r"^blocks\.\d+", "blocks.N", ours)
        module, _, kind = key.rpartition(".")
        name = self.names.get(key) or f"{self.names[module]}.{kind}"
        return name.replace(".N.", f".{ours.split('.')[1]}.")


def as_overrides(values: Mapping[str, Any]) -> list[str]:
    """Return settings as written on the command line."""
    return [f"{name}={str(value).lower()}" for name, value in values.items()]


# Positions that are neither stretched nor partial; `type` is the older key.
UNCHANGED_ROTARY = {"rope_type": "default", "type": "default", "partial_rotary_factor": 1.0}
ROTARY = (*UNCHANGED_ROTARY, "rope_theta")  # the rotary settings that we read


def _evaluate(table: Mapping[str, Any], node: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value(node) if callable(value) else value for key, value in table.items()}


def _even_head_dim(node: Mapping[str, Any]) -> int:
    return node["hidden_size"] // node["num_attention_heads"]


def _every_fourth_layer_unplaced(node: Mapping[str, Any]) -> list[int]:
    return [int((i + 1) % 4 > 0) for i in range(node["num_hidden_layers"])]


# Its layers are Conv1D, a transposed Linear, with fused queries, keys and values.
GPT2 = Family(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    fixed={
        "block": "gpt2",
        "position": "learned",
        "block.norm": "layer",
        "block.bias": True,
        "model.mlp": "gelu",
        "model.qkv_bias": True,
    },
    settings={
        "model.num_layers": "n_layer",
        "model.num_heads": "n_head",
        "model.d_model": "n_embd",
        "model.d_mlp": "n_inner",
        "model.context_length": "n_positions",
        "model.vocab_size": "vocab_size",
        "block.norm_eps": "layer_norm_epsilon",
        "block.tied_head": "tie_word_embeddings",
    },
    defaults={
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "n_inner": lambda node: 4 * node["n_embd"],
    },
    accepted={
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    },
    names={
        "token_embedding": "wte",
        "input_position.embedding": "wpe",
        "blocks.N.norm_attention": "h.N.ln_1",
        "blocks.N.attention.W_query": "h.N.attn.c_attn",
        "blocks.N.attention.W_key": "h.N.attn.c_attn",
        "blocks.N.attention.W_value": "h.N.attn.c_attn",
        "blocks.N.attention.out_proj": "h.N.attn.c_proj",
        "blocks.N.norm_mlp": "h.N.ln_2",
        "blocks.N.mlp.up": "h.N.mlp.c_fc",
        "blocks.N.mlp.down": "h.N.mlp.c_proj",
        "norm": "ln_f",
        HEAD: HEAD,
    },
    prefix="transformer.",
    skipped=(".attn.bias", ".attn.masked_bias"),  # causal masks in old files
    required={"add_cross_attention": False, "quantization_config": None},
    transposed=("h.",),
)

# Source: Touvron et al. 2023, arXiv:2302.13971, sec. 2.2; the names are those of transformers.
LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    fixed={
        "block": "llama",
        "position": "rope",
        "block.norm": "rms",
        "block.bias": False,
        "model.mlp": "swiglu",
        "model.qkv_bias": False,
        "position.fraction": 1.0,
        "position.stretch": 1.0,
    },
    settings={
        "model.num_layers": "num_hidden_layers",
        "model.num_heads": "num_attention_heads",
        "attn.num_kv_heads": "num_key_value_heads",
        "model.d_model": "hidden_size",
        "model.d_mlp": "intermediate_size",
        "model.context_length": "max_position_embeddings",
        "model.vocab_size": "vocab_size",
        "block.norm_eps": "rms_norm_eps",
        "block.tied_head": "tie_word_embeddings",
        "position.base": "rope_theta",
    },
    defaults={
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_theta": 10_000.0,
        "num_key_value_heads": lambda node: node["num_attention_heads"],
    },
    accepted={
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
    },
    names={
        "token_embedding": "embed_tokens",
        "blocks.N.norm_attention": "layers.N.input_layernorm",
        "blocks.N.attention.W_query": "layers.N.self_attn.q_proj",
        "blocks.N.attention.W_key": "layers.N.self_attn.k_proj",
        "blocks.N.attention.W_value": "layers.N.self_attn.v_proj",
        "blocks.N.attention.out_proj": "layers.N.self_attn.o_proj",
        "blocks.N.norm_mlp": "layers.N.post_attention_layernorm",
        "blocks.N.mlp.gate": "layers.N.mlp.gate_proj",
        "blocks.N.mlp.up": "layers.N.mlp.up_proj",
        "blocks.N.mlp.down": "layers.N.mlp.down_proj",
        "norm": "norm",
        HEAD: HEAD,
    },
    prefix="model.",
    skipped=(".rotary_emb.inv_freq",),  # tables in old files
    required=UNCHANGED_ROTARY
    | {
        "quantization_config": None,
        "layer_types": lambda node: ["full_attention"] * node["num_hidden_layers"],
        "head_dim": _even_head_dim,
    },
)

# Qwen 2 and 2.5: Llama with biases of queries, keys and values.
# Source: Yang et al. 2024, arXiv:2407.10671, sec. 2.2.1.
QWEN2 = replace(
    LLAMA,
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    fixed=LLAMA.fixed | {"model.qkv_bias": True},
    accepted={
        "hidden_act": ("silu",),
        "use_sliding_window": (False,),
    },
)

# Qwen 3: a norm on each head's queries and keys, and heads of their own size.
# Source: Qwen Team 2025, arXiv:2505.09388, sec. 2.
QWEN3 = replace(
    LLAMA,
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    fixed={"recipe": "qwen3"},
    settings=LLAMA.settings | {"attn.head_dim": "head_dim", "part.qk_norm.eps": "rms_norm_eps"},
    defaults=LLAMA.defaults | {"head_dim": _even_head_dim},
    accepted=LLAMA.accepted | {"use_sliding_window": (False,)},
    required={key: value for key, value in LLAMA.required.items() if key != "head_dim"},
    names=LLAMA.names
    | {
        "blocks.N.attention.parts.qk_norm.q_gain_D": "layers.N.self_attn.q_norm.weight",
        "blocks.N.attention.parts.qk_norm.k_gain_D": "layers.N.self_attn.k_norm.weight",
    },
)

# SmolLM3: Llama with no positions in every fourth layer.
SMOLLM3 = replace(
    LLAMA,
    name="smollm3",
    architecture="SmolLM3ForCausalLM",
    fixed={"recipe": "smollm3"},
    defaults=LLAMA.defaults | {"rope_theta": 2_000_000.0, "tie_word_embeddings": True},
    accepted=LLAMA.accepted | {"use_sliding_window": (False,)},
    required=LLAMA.required
    | {"no_rope_layers": _every_fourth_layer_unplaced, "no_rope_layer_interval": 4},
)

FAMILIES = {family.name: family for family in (GPT2, LLAMA, QWEN2, QWEN3, SMOLLM3)}
