"""Read and write Llama checkpoints in Hugging Face's format.

Source: Touvron et al. 2023, arXiv:2302.13971, sec. 2.2; the names are those of transformers.
"""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptattn.attention import Attention, GroupedQueryAttention
from gptattn.attention.base import HeadWeights
from gptattn.data import bpe_files, tokenizer_files
from gptattn.errors import ConfigError, DataError
from gptattn.model.block import BlockStyle
from gptattn.model.gpt import GPT
from gptattn.position.rope import RotaryPosition
from gptattn.weights import hugging_face
from gptattn.weights.hugging_face import Family, Layout, as_overrides, check_accepted, check_sizes

# Our name -> Llama's, of weights outside the attention.
OUTER = {"token_embedding.weight": "embed_tokens.weight", "norm.weight": "norm.weight"}
HEAD = "lm_head.weight"  # the same in both; it has no prefix
PER_LAYER = {
    "norm_attention.weight": "input_layernorm.weight",
    "norm_mlp.weight": "post_attention_layernorm.weight",
    "mlp.gate.weight": "mlp.gate_proj.weight",
    "mlp.up.weight": "mlp.up_proj.weight",
    "mlp.down.weight": "mlp.down_proj.weight",
}
PREFIX = "model."
SKIPPED = (".rotary_emb.inv_freq",)  # tables in old files
BASE = 10_000.0  # of the rotary positions, where config.json names none
# Accepted values of other keys in config.json; a missing key counts as the first, Llama's default.
ACCEPTED = {
    "model_type": ("llama",),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0, None),
}


@dataclass(frozen=True)
class Config:
    """What config.json says of a Llama."""

    sizes: dict[str, int]  # as settings of `model`
    num_kv_heads: int
    base: float
    norm_eps: float
    tied_head: bool

    @property
    def style(self) -> BlockStyle:
        return BlockStyle("rms", self.norm_eps, "swiglu", bias=False)


def read_config(folder: Path) -> Config:
    """Return what config.json says.

    Raises CheckpointError if the file is missing or describes a model other than Llama.
    """
    return hugging_face.read_config(folder, _config_of)


def _config_of(node: dict[str, Any]) -> Config:
    check_accepted(node, ACCEPTED)
    heads, width = int(node["num_attention_heads"]), int(node["hidden_size"])
    kv_heads, head_dim = node.get("num_key_value_heads"), node.get("head_dim")
    sizes = {
        "num_layers": int(node["num_hidden_layers"]),
        "num_heads": heads,
        "d_model": width,
        "context_length": int(node["max_position_embeddings"]),
        "vocab_size": int(node["vocab_size"]),
        "d_mlp": int(node["intermediate_size"]),
    }
    kv_heads = heads if kv_heads is None else int(kv_heads)
    check_sizes(sizes | {"num_key_value_heads": kv_heads})
    if head_dim is not None and int(head_dim) * heads != width:
        raise ValueError(f"head_dim is {head_dim!r:.60}, but must be hidden_size / heads")
    eps, tied = float(node.get("rms_norm_eps", 1e-6)), node.get("tie_word_embeddings", False)
    if not 0 < eps < math.inf or not isinstance(tied, bool):
        raise ValueError(f"rms_norm_eps is {eps}, tie_word_embeddings {tied!r:.60}")
    return Config(sizes, kv_heads, _base(node), eps, tied)


def _base(node: dict[str, Any]) -> float:
    """Return the base of the rotary positions.

    transformers 5 writes one dict, `rope_parameters`; before, `rope_theta` and `rope_scaling`.
    Raises ValueError for stretched positions.
    """
    rope = node.get("rope_scaling") or node.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(f"rope_type is {kind!r:.60}, but must be 'default'")
    check_accepted(rope, {"partial_rotary_factor": ACCEPTED["partial_rotary_factor"]})
    base = float(rope.get("rope_theta", node.get("rope_theta", BASE)))
    if not 0 < base < math.inf:
        raise ValueError(f"rope_theta is {base}")
    return base


def overrides(folder: Path) -> list[str]:
    """Return the settings of the Llama in `folder`; raises as `read_config` does."""
    config = read_config(folder)
    grouped = config.num_kv_heads != config.sizes["num_heads"]
    attn = {"attn": "gqa", "attn.num_kv_heads": config.num_kv_heads} if grouped else {"attn": "mha"}
    settings = {
        "block": "llama",
        "block.norm_eps": config.norm_eps,
        "block.tied_head": config.tied_head,
        "position.base": config.base,
    }
    sizes = {f"model.{name}": size for name, size in config.sizes.items()}
    return as_overrides(attn | settings | sizes)


def load(folder: Path) -> GPT:
    """Load the Llama in `folder` with GroupedQueryAttention, in eval mode and float32.

    Raises CheckpointError if a file is missing or damaged, or the weights do not fit config.json;
    NumericError for a weight that is not finite.
    """
    config = read_config(folder)
    sizes = config.sizes
    width, heads, context = sizes["d_model"], sizes["num_heads"], sizes["context_length"]

    def build() -> GPT:
        position = RotaryPosition(context, width // heads, config.base)
        return GPT(
            vocab_size=sizes["vocab_size"],
            context_length=context,
            d_model=width,
            num_layers=sizes["num_layers"],
            attention=lambda layer: _attention(
                width, context, heads, config.num_kv_heads, position
            ),
            input_position=None,
            d_mlp=sizes["d_mlp"],
            dropout=0.0,
            style=config.style,
            tied_head=config.tied_head,
        )

    # A head that is tied may be in the file as well.
    skipped = (*SKIPPED, f".{HEAD}") if config.tied_head else SKIPPED
    layout = Layout(lambda: _shapes(config), "layers.", sizes["num_layers"], PREFIX, skipped)
    return hugging_face.load(folder, build, layout, _fill)


def _attention(
    width: int, context: int, heads: int, kv_heads: int, position: RotaryPosition
) -> GroupedQueryAttention:
    return GroupedQueryAttention(
        width, width, context, heads, num_kv_heads=kv_heads, out_bias=False, position=position
    )


def _shapes(config: Config) -> dict[str, list[int]]:
    """The name and shape of every tensor of this Llama, without the prefix."""
    sizes = config.sizes
    width, inner = sizes["d_model"], sizes["d_mlp"]
    kv = width // sizes["num_heads"] * config.num_kv_heads
    shapes = {"embed_tokens.weight": [sizes["vocab_size"], width], "norm.weight": [width]}
    if not config.tied_head:
        shapes[HEAD] = [sizes["vocab_size"], width]
    layer = {"input_layernorm": [width], "post_attention_layernorm": [width]}
    layer |= {"mlp.gate_proj": [inner, width], "mlp.up_proj": [inner, width]}
    layer |= {"mlp.down_proj": [width, inner], "self_attn.q_proj": [width, width]}
    layer |= {"self_attn.k_proj": [kv, width], "self_attn.v_proj": [kv, width]}
    layer |= {"self_attn.o_proj": [width, width]}
    for number in range(sizes["num_layers"]):
        shapes |= {f"layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def _fill(model: GPT, theirs: dict[str, Tensor]) -> None:
    """Put Llama's weights into `model`, which has the same sizes and GroupedQueryAttention."""
    own = model.state_dict()
    for ours, name in _names(model).items():
        own[ours].copy_(theirs[name.removeprefix(PREFIX)])
    for layer, block in enumerate(model.layers()):
        attention = block.attention
        assert isinstance(attention, GroupedQueryAttention)
        names = (f"layers.{layer}.self_attn.{name}_proj.weight" for name in "qkvo")
        q, k, v, out = (theirs[name] for name in names)
        q, k, v = (weight.unflatten(0, (-1, attention.head_dim)) for weight in (q, k, v))
        out = out.unflatten(1, (-1, attention.head_dim))
        attention.load_heads(HeadWeights(q, k, v, None, None, None, out, None))


@torch.no_grad()
def write(folder: Path, model: GPT) -> None:
    """Write a folder that `transformers.LlamaForCausalLM.from_pretrained` opens.

    Raises ConfigError for a model that is no Llama: another block, biases, other positions than
    plain rotary ones, no output projection, layers that differ in their key/value heads, attention
    parameters beyond these, or an attention that computes something else from the same heads.
    """
    style = model.style
    if (style.norm, style.mlp, style.bias) != ("rms", "swiglu", False):
        raise ConfigError(
            "to",
            "Llama has RMSNorm and SwiGLU without biases, but this model has "
            f"block.norm={style.norm}, model.mlp={style.mlp} and "
            f"block.bias={str(style.bias).lower()}; train with block=llama",
        )
    rope = next((m for m in model.modules() if isinstance(m, RotaryPosition)), None)
    if rope is None or model.input_position is not None:
        raise ConfigError("to", "Llama has rotary positions, and this model has not")
    plain = partial(_plain, rope)
    own = model.state_dict()
    weights = {name: own[ours] for ours, name in _names(model).items()}
    counts: list[tuple[int, int]] = []
    for layer, block in enumerate(model.layers()):
        w = hugging_face.exported(layer, block.attention, "Llama", plain)
        assert w.out_EHD is not None
        counts.append((len(w.q_HDE), len(w.k_GDE)))
        name = f"{PREFIX}layers.{layer}.self_attn"
        for letter, heads in zip("qkv", (w.q_HDE, w.k_GDE, w.v_GDE), strict=True):
            weights[f"{name}.{letter}_proj.weight"] = heads.flatten(0, 1)
        weights[f"{name}.o_proj.weight"] = w.out_EHD.flatten(1)
    if len(set(counts)) > 1:
        raise ConfigError(
            "to", "Llama has as many heads in every layer; convert to one count first"
        )
    hugging_face.write(folder, _config(model, *counts[0], rope.base), weights)


def _plain(
    rope: RotaryPosition, attention: Attention, weights: HeadWeights
) -> GroupedQueryAttention:
    """Return Llama's attention at these sizes. Raises ValueError if it cannot have these weights.

    `rope` is the model's; Llama's is neither partial nor stretched.
    """
    biases = (weights.q_bias_HD, weights.k_bias_GD, weights.v_bias_GD, weights.out_bias_E)
    if any(bias is not None for bias in biases):
        raise ValueError("Llama has no biases in its attention, but this model has")
    if weights.out_EHD is None:
        raise ValueError("Llama has an output projection, but this model has none")
    T, (heads, D, _) = attention.context_length, weights.q_HDE.shape
    plain = RotaryPosition(T, D, rope.base)
    x_BHTD = torch.randn(1, 1, T, D, generator=torch.Generator().manual_seed(0))
    ours, theirs = (position.rotate(x_BHTD, x_BHTD, range(T))[0] for position in (rope, plain))
    if not torch.allclose(ours, theirs, atol=1e-5):
        raise ValueError(
            "Llama's rotary positions are neither partial nor stretched, but these are"
        )
    return _attention(attention.d_in, T, heads, len(weights.k_GDE), plain)


def _names(model: GPT) -> dict[str, str]:
    """Our name -> Llama's name of every weight outside the attention."""
    names = {ours: PREFIX + name for ours, name in OUTER.items()}
    for layer in range(len(model.blocks)):
        inside = PER_LAYER.items()
        names |= {f"blocks.{layer}.{o}": f"{PREFIX}layers.{layer}.{t}" for o, t in inside}
    return names if model.lm_head is None else names | {HEAD: HEAD}


def _config(model: GPT, heads: int, kv_heads: int, base: float) -> dict[str, Any]:
    width = model.token_embedding.embedding_dim
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": len(model.blocks),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": width // heads,
        "hidden_size": width,
        "intermediate_size": model.layers()[0].d_mlp,
        "max_position_embeddings": model.context_length,
        "vocab_size": model.vocab_size,
        "hidden_act": "silu",
        "rms_norm_eps": model.style.norm_eps,
        "rope_theta": base,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": model.lm_head is None,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def has_tokenizer(folder: Path) -> bool:
    """Whether the folder holds a tokenizer.json that `tokenizer=gpt2` reads right.

    Most Llamas have another kind. Files without tokenizer.json do not say which kind they are.
    """
    if [file.name for file in tokenizer_files.find(folder)] != ["tokenizer.json"]:
        return False
    try:
        bpe_files.read(folder)
    except DataError:
        return False
    return True


CHOICES = {"block": "llama", "position": "rope"}
FAMILY = Family("llama", CHOICES, overrides, load, write, has_tokenizer)
