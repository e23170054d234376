"""The kinds of Hugging Face checkpoints that we read and write, each a table of names.

What a table cannot express is a function: values that config.json omits, and rotary settings.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gptattn.settings.compose import settings
from gptattn.settings.config import TrainConfig

HEAD = "lm_head"  # the same name in all families, and without their prefix


@dataclass(frozen=True)
class Family:
    """One kind of model, such as GPT-2.

    If several of our modules share a name in `names`, that tensor holds ours one after the other.
    """

    name: str  # `model_type` in config.json
    title: str  # in messages
    architecture: str  # the class in transformers
    fixed: dict[str, Any]  # the settings that all its models share
    settings: dict[str, str]  # the other settings, ours -> their key in config.json
    defaults: dict[str, Any]  # what a missing key means
    accepted: dict[str, tuple[Any, ...]]  # values of further keys; first the one that we write
    names: dict[str, str]  # our module -> theirs; N is the layer's number
    prefix: str  # of all names but the head's, as we write them and in most files
    skipped: tuple[str, ...]  # suffixes of names that are not read
    transposed: str | None  # matrices whose names begin so are stored transposed
    complete: Callable[[dict[str, Any]], None]  # puts what config.json says otherwise under its key

    def read_values(self, node: Mapping[str, Any]) -> dict[str, int | float | bool]:
        """Return our settings in a config.json. Raises ValueError or KeyError for another model."""
        node = self.defaults | {key: value for key, value in node.items() if value is not None}
        for key, allowed in self.accepted.items():
            if node.get(key, allowed[0]) not in allowed:
                raise ValueError(f"{key} is {node[key]!r:.60}, but must be {allowed[0]!r}")
        self.complete(node)
        values = {ours: node[key] for ours, key in self.settings.items()}
        for ours, value in values.items():
            if not isinstance(value, int | float):
                raise ValueError(f"{self.settings[ours]} is {value!r:.60}, not a number or a bool")
        return values

    def make_settings(self, values: Mapping[str, Any], tokenizer: list[str]) -> TrainConfig:
        """Return the settings of the model with these values. Raises ConfigError as `settings`.

        `tokenizer`: the overrides that choose it.
        """
        if "recipe" in self.fixed:
            return settings([*as_overrides({**self.fixed, **values}), *tokenizer])
        chosen: dict[str, Any] = {"attn": "mha", **self.fixed, **values}
        heads = chosen.pop("attn.num_kv_heads", None)
        if heads not in (None, values["model.num_heads"]):
            chosen |= {"attn": "gqa", "attn.num_kv_heads": heads}
        return settings([*as_overrides(chosen), *tokenizer])

    def rename(self, ours: str) -> str:
        """Return the name of the tensor in which theirs holds our parameter."""
        module, _, kind = ours.rpartition(".")
        number = re.match(r"blocks\.(\d+)\.", module)
        key = module if number is None else f"blocks.N{module[number.end() - 1 :]}"
        alone = self.names.get(f"{key}.{kind}")  # a parameter whose name is another there
        name = f"{self.names[key]}.{kind}" if alone is None else alone
        return name if number is None else name.replace("N", number[1])


def as_overrides(values: Mapping[str, Any]) -> list[str]:
    """Return settings as written on the command line."""
    return [f"{name}={str(value).lower()}" for name, value in values.items()]


def _complete_gpt2(node: dict[str, Any]) -> None:
    node.setdefault("n_inner", 4 * node["n_embd"])
    node.setdefault("n_positions", node.get("n_ctx"))


def _complete_llama(node: dict[str, Any]) -> None:
    """Raise ValueError for heads of another size, and positions that are stretched or partial."""
    heads, head_dim = node["num_attention_heads"], node.get("head_dim")
    if head_dim is not None and head_dim * heads != node["hidden_size"]:
        raise ValueError(f"head_dim is {head_dim!r:.60}, but must be hidden_size / heads")
    _complete_rotary(node)


def _complete_qwen3(node: dict[str, Any]) -> None:
    node.setdefault("head_dim", node["hidden_size"] // node["num_attention_heads"])
    _complete_rotary(node)


def _complete_smollm3(node: dict[str, Any]) -> None:
    """Raise ValueError as `_complete_llama`, and for other layers without positions."""
    rotates = [int((i + 1) % 4 > 0) for i in range(node["num_hidden_layers"])]
    if node.get("no_rope_layers", rotates) != rotates:
        raise ValueError("no_rope_layers must leave out every fourth layer")
    _complete_llama(node)


def _complete_rotary(node: dict[str, Any]) -> None:
    """Raise ValueError for positions that are stretched or partial.

    transformers 5 writes one dict, `rope_parameters`; before, `rope_theta` and `rope_scaling`.
    """
    node.setdefault("num_key_value_heads", node["num_attention_heads"])
    rope = {**(node.get("rope_scaling") or node.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(f"rope_type is {kind!r:.60}, but must be 'default'")
    for where in (node, rope):
        if where.get("partial_rotary_factor") not in (None, 1.0):
            raise ValueError(
                f"partial_rotary_factor is {where['partial_rotary_factor']!r:.60}, but must be 1.0"
            )
    node["rope_theta"] = float(rope.get("rope_theta", node["rope_theta"]))
    node["rms_norm_eps"] = float(node["rms_norm_eps"])


# Its layers are Conv1D, a transposed Linear, with fused queries, keys and values.
GPT2 = Family(
    name="gpt2",
    title="GPT-2",
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
    defaults={"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
    accepted={
        "model_type": ("gpt2",),
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
    transposed="h.",
    complete=_complete_gpt2,
)

# Source: Touvron et al. 2023, arXiv:2302.13971, sec. 2.2; the names are those of transformers.
LLAMA = Family(
    name="llama",
    title="Llama",
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
    defaults={"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 10_000.0},
    accepted={
        "model_type": ("llama",),
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
    transposed=None,
    complete=_complete_llama,
)

# Qwen 2 and 2.5: Llama with biases of queries, keys and values.
# Source: Yang et al. 2024, arXiv:2407.10671, sec. 2.2.1.
QWEN2 = replace(
    LLAMA,
    name="qwen2",
    title="Qwen2",
    architecture="Qwen2ForCausalLM",
    fixed=LLAMA.fixed | {"model.qkv_bias": True},
    accepted={
        "model_type": ("qwen2",),
        "hidden_act": ("silu",),
        "use_sliding_window": (False,),
    },
)

# A recipe sets the attention; these are the block.
OF_RECIPES = {
    "block": "llama",
    "block.norm": "rms",
    "block.bias": False,
    "model.mlp": "swiglu",
}

# Qwen 3: a norm on each head's queries and keys, and heads of their own size.
# Source: Qwen Team 2025, arXiv:2505.09388, sec. 2.
QWEN3 = replace(
    LLAMA,
    name="qwen3",
    title="Qwen3",
    architecture="Qwen3ForCausalLM",
    fixed=OF_RECIPES | {"recipe": "qwen3"},
    settings=LLAMA.settings | {"attn.head_dim": "head_dim", "part.qk_norm.eps": "rms_norm_eps"},
    accepted={
        "model_type": ("qwen3",),
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "use_sliding_window": (False,),
    },
    names=LLAMA.names
    | {
        "blocks.N.attention.parts.qk_norm.q_gain_D": "layers.N.self_attn.q_norm.weight",
        "blocks.N.attention.parts.qk_norm.k_gain_D": "layers.N.self_attn.k_norm.weight",
    },
    complete=_complete_qwen3,
)

# SmolLM3: Llama with no positions in every fourth layer.
SMOLLM3 = replace(
    LLAMA,
    name="smollm3",
    title="SmolLM3",
    architecture="SmolLM3ForCausalLM",
    fixed=OF_RECIPES | {"recipe": "smollm3"},
    accepted=LLAMA.accepted | {"model_type": ("smollm3",), "use_sliding_window": (False,)},
    complete=_complete_smollm3,
)

FAMILIES = {family.name: family for family in (GPT2, LLAMA, QWEN2, QWEN3, SMOLLM3)}
