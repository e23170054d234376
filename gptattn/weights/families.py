"""The kinds of Hugging Face checkpoints that we read and write, each a table of names."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from gptattn.attention import HasHeads, HeadWeights
from gptattn.data import tokenizer_files
from gptattn.data.bpe import ByteLevelBPE
from gptattn.errors import ConfigError, DataError
from gptattn.model.gpt import GPT, GPT2_STYLE, BlockStyle
from gptattn.position import LearnedPosition
from gptattn.weights.family import HEAD, Family, Sizes, find_rope
from gptattn.weights.hugging_face import check_accepted, is_checkpoint, read_config

GPT2_END = 50256  # <|endoftext|>
LLAMA_STYLE = BlockStyle(norm="rms", mlp="swiglu", bias=False)


class GPT2(Family):
    """GPT-2, whose layers are Conv1D (a transposed Linear), with fused queries, keys and values."""

    name, title, architecture = "gpt2", "GPT-2", "GPT2LMHeadModel"
    choices: ClassVar = {"block": "gpt2", "position": "learned"}
    sizes: ClassVar = {
        "num_layers": "n_layer",
        "num_heads": "n_head",
        "d_model": "n_embd",
        "d_mlp": "n_inner",
        "context_length": "n_positions",
        "vocab_size": "vocab_size",
    }
    accepted: ClassVar = {
        "model_type": ("gpt2",),
        "layer_norm_epsilon": (GPT2_STYLE.norm_eps,),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "tie_word_embeddings": (True,),
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    }
    names: ClassVar = {
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
    }
    layers, prefix = "h.", "transformer."
    skipped = (".attn.bias", ".attn.masked_bias")  # causal masks in old files
    qkv_bias = out_bias = True

    def transpose(self, name: str, tensor: Tensor) -> Tensor:
        return tensor.T if name.startswith(self.layers) and tensor.ndim == 2 else tensor

    def read_more(self, node: dict[str, Any]) -> dict[str, Any]:
        if node.get("n_inner") is None:
            node["n_inner"] = 4 * int(node["n_embd"])
        node["n_positions"] = node.get("n_positions") or node["n_ctx"]
        return {"num_kv_heads": int(node["n_head"])}

    def write_more(self, sizes: Sizes) -> dict[str, Any]:
        end = GPT2_END if sizes.vocab_size > GPT2_END else None
        return {"bos_token_id": end, "eos_token_id": end}

    def settings(self, sizes: Sizes) -> dict[str, Any]:
        return {"model.qkv_bias": True}

    def check_model(self, model: GPT) -> None:
        if replace(model.style, zero_init=False) != GPT2_STYLE or model.lm_head is not None:
            raise ConfigError(
                "to",
                "GPT-2 has LayerNorm with epsilon 1e-5, an MLP with GELU and biases, and a tied "
                "head, but this model does not; train with block=gpt2",
            )
        if not isinstance(model.input_position, LearnedPosition):
            raise ConfigError("to", "GPT-2 has learned positions, but this model does not")

    def check_heads(self, weights: HeadWeights) -> None:
        if len(weights.k_GDE) != len(weights.q_HDE):
            raise ValueError("GPT-2 has a key/value head for each query head; convert first")
        super().check_heads(weights)

    def has_tokenizer(self, folder: Path) -> bool:
        return bool(tokenizer_files.find(folder))


class Llama(Family):
    """Llama with positions that are not stretched.

    Source: Touvron et al. 2023, arXiv:2302.13971, sec. 2.2; the names are those of transformers.
    """

    name, title, architecture = "llama", "Llama", "LlamaForCausalLM"
    choices: ClassVar = {"block": "llama", "position": "rope"}
    sizes: ClassVar = {
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "d_model": "hidden_size",
        "d_mlp": "intermediate_size",
        "context_length": "max_position_embeddings",
        "vocab_size": "vocab_size",
    }
    accepted: ClassVar = {
        "model_type": ("llama",),
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
    }
    names: ClassVar = {
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
    }
    layers, prefix = "layers.", "model."
    skipped = (".rotary_emb.inv_freq",)  # tables in old files
    qkv_bias = out_bias = False

    def read_more(self, node: dict[str, Any]) -> dict[str, Any]:
        heads, head_dim = int(node["num_attention_heads"]), node.get("head_dim")
        if node.get("num_key_value_heads") is None:
            node["num_key_value_heads"] = heads
        if head_dim is not None and int(head_dim) * heads != int(node["hidden_size"]):
            raise ValueError(f"head_dim is {head_dim!r:.60}, but must be hidden_size / heads")
        eps, tied = float(node.get("rms_norm_eps", 1e-6)), node.get("tie_word_embeddings", False)
        if not 0 < eps < math.inf or not isinstance(tied, bool):
            raise ValueError(f"rms_norm_eps is {eps}, tie_word_embeddings {tied!r:.60}")
        style = replace(LLAMA_STYLE, norm_eps=eps)
        return {"style": style, "tied_head": tied, "base": _read_base(node)}

    def write_more(self, sizes: Sizes) -> dict[str, Any]:
        return {
            "head_dim": sizes.d_model // sizes.num_heads,
            "rms_norm_eps": sizes.style.norm_eps,
            "rope_theta": sizes.base,
            "tie_word_embeddings": sizes.tied_head,
            "bos_token_id": None,
            "eos_token_id": None,
        }

    def settings(self, sizes: Sizes) -> dict[str, Any]:
        return {
            "block.norm_eps": sizes.style.norm_eps,
            "block.tied_head": sizes.tied_head,
            "position.base": sizes.base,
        }

    def check_model(self, model: GPT) -> None:
        style = model.style
        if (style.norm, style.mlp, style.bias) != ("rms", "swiglu", False):
            raise ConfigError(
                "to",
                f"{self.title} has RMSNorm and SwiGLU without biases, but this model has "
                f"block.norm={style.norm}, model.mlp={style.mlp} and "
                f"block.bias={str(style.bias).lower()}; train with block=llama",
            )
        rope = find_rope(model)
        if rope is None or model.input_position is not None:
            raise ConfigError("to", f"{self.title} has rotary positions, but this model does not")
        if rope.fraction != 1 or rope.stretch != 1:
            raise ConfigError(
                "to",
                f"{self.title}'s rotary positions are neither partial nor stretched, but these are",
            )

    def has_tokenizer(self, folder: Path) -> bool:
        # Most Llamas have another kind. Without tokenizer.json, the files do not say which.
        if [file.name for file in tokenizer_files.find(folder)] != ["tokenizer.json"]:
            return False
        try:
            ByteLevelBPE(str(folder))
        except DataError:
            return False
        return True


class Qwen2(Llama):
    """Qwen 2 and 2.5: Llama with biases of queries, keys and values.

    Source: Yang et al. 2024, arXiv:2407.10671, sec. 2.2.1.
    """

    name, title, architecture = "qwen2", "Qwen2", "Qwen2ForCausalLM"
    accepted: ClassVar = {
        "model_type": ("qwen2",),
        "hidden_act": ("silu",),
        "use_sliding_window": (False,),
    }
    qkv_bias = True

    def settings(self, sizes: Sizes) -> dict[str, Any]:
        return super().settings(sizes) | {"model.qkv_bias": True}


def _read_base(node: dict[str, Any]) -> float:
    """Return the base of the rotary positions.

    transformers 5 writes one dict, `rope_parameters`; before, `rope_theta` and `rope_scaling`.
    Raises ValueError for positions that are stretched or partial.
    """
    rope = node.get("rope_scaling") or node.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(f"rope_type is {kind!r:.60}, but must be 'default'")
    for where in (node, rope):
        check_accepted(where, {"partial_rotary_factor": (1.0, None)})
    base = float(rope.get("rope_theta", node.get("rope_theta", 10_000.0)))
    if not 0 < base < math.inf:
        raise ValueError(f"rope_theta is {base}")
    return base


FAMILIES: dict[str, Family] = {family.name: family for family in (GPT2(), Llama(), Qwen2())}


def family_of(folder: Path) -> Family | None:
    """Return the family of the checkpoint in `folder`, or None if that holds no checkpoint.

    Raises CheckpointError if its config.json is damaged or names another kind of model.
    """
    return read_config(folder, _find_family) if is_checkpoint(folder) else None


def _find_family(node: dict[str, Any]) -> Family:
    name = node.get("model_type", "gpt2")  # missing in GPT-2's own release
    if not isinstance(name, str) or name not in FAMILIES:
        raise ValueError(f"model_type is {name!r:.60}, but must be one of {', '.join(FAMILIES)}")
    return FAMILIES[name]


def write(folder: Path, model: GPT) -> None:
    """Write a Hugging Face folder: with RMSNorm Llama's, or Qwen2's for qkv biases; else GPT-2's.

    Raises ConfigError, with the reason, if the family has no such model.
    """
    family = "gpt2"
    if model.style.norm == "rms":
        first = model.layers()[0].attention
        biased = isinstance(first, HasHeads) and first.export_heads().q_bias_HD is not None
        family = "qwen2" if biased else "llama"
    FAMILIES[family].write(folder, model)
