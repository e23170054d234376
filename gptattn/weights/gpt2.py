"""Read and write GPT-2 checkpoints in Hugging Face's format."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptattn.attention import Attention, MultiHeadAttention
from gptattn.attention.base import HeadWeights
from gptattn.data import tokenizer_files
from gptattn.errors import ConfigError
from gptattn.model.block import GPT2_STYLE
from gptattn.model.gpt import GPT
from gptattn.position.learned import LearnedPosition
from gptattn.weights import hugging_face
from gptattn.weights.hugging_face import Family, Layout, as_overrides, check_accepted, check_sizes

GPT2_END = 50256  # <|endoftext|>
# Our name -> GPT-2's. GPT-2's Conv1D weights are the transpose of our Linear weights.
OUTER = {
    "token_embedding.weight": "wte.weight",
    "input_position.embedding.weight": "wpe.weight",
    "norm.weight": "ln_f.weight",
    "norm.bias": "ln_f.bias",
}
PER_LAYER = {
    "norm_attention.weight": "ln_1.weight",
    "norm_attention.bias": "ln_1.bias",
    "norm_mlp.weight": "ln_2.weight",
    "norm_mlp.bias": "ln_2.bias",
    "mlp.up.weight": "mlp.c_fc.weight",
    "mlp.up.bias": "mlp.c_fc.bias",
    "mlp.down.weight": "mlp.c_proj.weight",
    "mlp.down.bias": "mlp.c_proj.bias",
}
TRANSPOSED = ("mlp.c_fc.weight", "mlp.c_proj.weight")
# Entries to skip: causal masks in old files, and the head, which is tied to the embedding.
SKIPPED = (".attn.bias", ".attn.masked_bias", "lm_head.weight")
PREFIX = "transformer."  # of tensor names in some files
GELU = ("gelu_new", "gelu_pytorch_tanh")
# Accepted values of other keys in config.json; a missing key counts as the first, GPT-2's default.
ACCEPTED = {
    "model_type": ("gpt2",),
    "layer_norm_epsilon": (GPT2_STYLE.norm_eps,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "tie_word_embeddings": (True,),
    "activation_function": GELU,
}


def read_config(folder: Path) -> dict[str, int]:
    """Return the sizes in config.json as settings of `model`.

    Raises CheckpointError if the file is missing or describes a model other than GPT-2.
    """
    return hugging_face.read_config(folder, _sizes)


def _sizes(node: dict[str, Any]) -> dict[str, int]:
    check_accepted(node, ACCEPTED)
    width, inner = int(node["n_embd"]), node.get("n_inner")
    sizes = {
        "num_layers": int(node["n_layer"]),
        "num_heads": int(node["n_head"]),
        "d_model": width,
        "context_length": int(node.get("n_positions") or node["n_ctx"]),
        "vocab_size": int(node["vocab_size"]),
        "d_mlp": 4 * width if inner is None else int(inner),
    }
    check_sizes(sizes)
    return sizes


def overrides(folder: Path) -> list[str]:
    """Return the settings of the GPT-2 in `folder`; raises as `read_config` does."""
    sizes = {f"model.{name}": size for name, size in read_config(folder).items()}
    return ["attn=mha", "position=learned", *as_overrides(sizes | {"model.qkv_bias": True})]


def load(folder: Path) -> GPT:
    """Load the GPT-2 in `folder` with MultiHeadAttention, in eval mode.

    Raises CheckpointError if a file is missing or damaged, or the weights do not fit config.json;
    NumericError for a weight that is not finite.
    """
    sizes = read_config(folder)
    width, context = sizes["d_model"], sizes["context_length"]

    def build() -> GPT:
        return GPT(
            vocab_size=sizes["vocab_size"],
            context_length=context,
            d_model=width,
            num_layers=sizes["num_layers"],
            attention=lambda layer: MultiHeadAttention(
                width, width, context, sizes["num_heads"], qkv_bias=True
            ),
            input_position=LearnedPosition(context, width),
            d_mlp=sizes["d_mlp"],
            dropout=0.0,
        )

    layout = Layout(lambda: _shapes(sizes), "h.", sizes["num_layers"], PREFIX, SKIPPED)
    return hugging_face.load(folder, build, layout, _fill)


def _shapes(sizes: dict[str, int]) -> dict[str, list[int]]:
    """The name and shape of every tensor in the file of a GPT-2 of these sizes."""
    width, inner = sizes["d_model"], sizes["d_mlp"]
    shapes = {
        "wte.weight": [sizes["vocab_size"], width],
        "wpe.weight": [sizes["context_length"], width],
        "ln_f.weight": [width],
        "ln_f.bias": [width],
    }
    layer = {"mlp.c_fc": (width, inner), "mlp.c_proj": (inner, width)}
    layer |= {"attn.c_attn": (width, 3 * width), "attn.c_proj": (width, width)}
    for number in range(sizes["num_layers"]):
        for name in ("ln_1.weight", "ln_1.bias", "ln_2.weight", "ln_2.bias"):
            shapes[f"h.{number}.{name}"] = [width]
        for name, (rows, columns) in layer.items():
            shapes[f"h.{number}.{name}.weight"] = [rows, columns]
            shapes[f"h.{number}.{name}.bias"] = [columns]
    return shapes


def _fill(model: GPT, theirs: dict[str, Tensor]) -> None:
    """Put GPT-2's weights into `model`, which has the same sizes and MultiHeadAttention."""
    own = model.state_dict()
    for ours, name in _names(model).items():
        own[ours].copy_(theirs[name].T if name.endswith(TRANSPOSED) else theirs[name])
    for layer, block in enumerate(model.layers()):
        attention = block.attention
        assert isinstance(attention, MultiHeadAttention)
        D, name = attention.head_dim, f"h.{layer}.attn"
        q, k, v = theirs[f"{name}.c_attn.weight"].T.unflatten(0, (3, -1, D))
        q_bias, k_bias, v_bias = theirs[f"{name}.c_attn.bias"].unflatten(0, (3, -1, D))
        out = theirs[f"{name}.c_proj.weight"].T.unflatten(1, (-1, D))
        out_bias = theirs[f"{name}.c_proj.bias"]
        attention.load_heads(HeadWeights(q, k, v, q_bias, k_bias, v_bias, out, out_bias))


@torch.no_grad()
def write(folder: Path, model: GPT) -> None:
    """Write a folder that `transformers.GPT2LMHeadModel.from_pretrained` opens.

    Raises ConfigError for a model that is no GPT-2: another block, an untied head, fewer key/value
    heads than query heads, no learned positions, no qkv bias, no output projection, attention
    parameters beyond these, or an attention that computes something else from the same heads.
    """
    if replace(model.style, zero_init=False) != GPT2_STYLE or model.lm_head is not None:
        raise ConfigError(
            "to",
            "GPT-2 has LayerNorm with epsilon 1e-5, an MLP with GELU and biases, and a tied head, "
            "but this model has not; train with block=gpt2",
        )
    if not isinstance(model.input_position, LearnedPosition):
        raise ConfigError("to", "GPT-2 has learned positions, and this model has not")
    own, weights = model.state_dict(), {}
    for ours, name in _names(model).items():
        tensor = own[ours].T if name.endswith(TRANSPOSED) else own[ours]
        weights[PREFIX + name] = tensor
    heads = 0
    for layer, block in enumerate(model.layers()):
        w = hugging_face.exported(layer, block.attention, "GPT-2", _plain)
        assert w.out_EHD is not None
        heads, name = len(w.q_HDE), f"{PREFIX}h.{layer}.attn"
        biases = [b.flatten() for b in (w.q_bias_HD, w.k_bias_GD, w.v_bias_GD) if b is not None]
        qkv = torch.cat([t.flatten(0, 1) for t in (w.q_HDE, w.k_GDE, w.v_GDE)])
        weights[f"{name}.c_attn.weight"] = qkv.T
        weights[f"{name}.c_attn.bias"] = torch.cat(biases)
        weights[f"{name}.c_proj.weight"] = w.out_EHD.flatten(1).T
        weights[f"{name}.c_proj.bias"] = w.out_bias_E
    hugging_face.write(folder, _config(model, heads), weights)


def _plain(attention: Attention, weights: HeadWeights) -> MultiHeadAttention:
    """Return GPT-2's attention at these sizes; raises ValueError if it has no such weights."""
    if len(weights.k_GDE) != len(weights.q_HDE):
        raise ValueError("GPT-2 has a key/value head for each query head; convert first")
    if weights.q_bias_HD is None or weights.k_bias_GD is None or weights.v_bias_GD is None:
        raise ValueError("GPT-2 has qkv biases, but this model has none")
    if weights.out_EHD is None or weights.out_bias_E is None:
        raise ValueError("GPT-2 has an output projection with a bias, but this model has none")
    d, heads = attention.d_in, len(weights.q_HDE)
    return MultiHeadAttention(d, d, attention.context_length, heads, qkv_bias=True)


def _names(model: GPT) -> dict[str, str]:
    """Our name -> GPT-2's name of every weight outside the attention."""
    names = dict(OUTER)
    for layer in range(len(model.blocks)):
        names |= {f"blocks.{layer}.{o}": f"h.{layer}.{t}" for o, t in PER_LAYER.items()}
    return names


def _config(model: GPT, heads: int) -> dict[str, Any]:
    end = GPT2_END if model.vocab_size > GPT2_END else None
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_layer": len(model.blocks),
        "n_head": heads,
        "n_embd": model.token_embedding.embedding_dim,
        "n_inner": model.layers()[0].d_mlp,
        "n_positions": model.context_length,
        "vocab_size": model.vocab_size,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": model.style.norm_eps,
        "tie_word_embeddings": True,
        "bos_token_id": end,
        "eos_token_id": end,
    }


def has_tokenizer(folder: Path) -> bool:
    """Whether the folder holds the files of a tokenizer; a GPT-2's is `tokenizer=gpt2`."""
    return bool(tokenizer_files.find(folder))


CHOICES = {"block": "gpt2", "position": "learned"}
FAMILY = Family("gpt2", CHOICES, overrides, load, write, has_tokenizer)
