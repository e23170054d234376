"""Read and write GPT-2 checkpoints in Hugging Face's format: config.json, model.safetensors."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptattn.attention import Attention, MultiHeadAttention
from gptattn.attention.capabilities import HeadWeights, heads_of, refuse_loss
from gptattn.errors import CheckpointError, ConfigError
from gptattn.machine.disk import write_atomically
from gptattn.machine.untrusted import read_bytes
from gptattn.model.gpt import GPT
from gptattn.position.learned import LearnedPosition
from gptattn.runs.tensor_file import opened, outline, read_tensors, write_weights

CONFIG_BYTES = 1_000_000
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
FILES = ("config.json", "model.safetensors")
# Accepted values of other keys in config.json; a missing key counts as the first, GPT-2's default.
ACCEPTED = {
    "model_type": ("gpt2",),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "tie_word_embeddings": (True,),
    "activation_function": GELU,
}


def is_gpt2(folder: Path) -> bool:
    """Whether the folder holds a config.json, as GPT-2's do and run folders do not."""
    return (folder / "config.json").is_file()


def read_config(folder: Path) -> dict[str, Any]:
    """Return the sizes in config.json as settings of `model`.

    Raises CheckpointError if the file is missing or describes a model other than GPT-2.
    """
    file = folder / "config.json"
    try:
        node = json.loads(read_bytes(file, CONFIG_BYTES).decode("utf-8"))
        for name, allowed in ACCEPTED.items():
            if node.get(name, allowed[0]) not in allowed:
                raise ValueError(f"{name} is {node[name]!r:.60}, but must be {allowed[0]!r}")
        width, inner = int(node["n_embd"]), node.get("n_inner")
        sizes = {
            "num_layers": int(node["n_layer"]),
            "num_heads": int(node["n_head"]),
            "d_model": width,
            "context_length": int(node.get("n_positions") or node["n_ctx"]),
            "vocab_size": int(node["vocab_size"]),
            "d_mlp": 4 * width if inner is None else int(inner),
        }
        for name, size in sizes.items():
            if not 0 < size < 2**31:
                raise ValueError(f"{name} is {size}")
    except FileNotFoundError:
        raise CheckpointError(
            "path", f"{folder} has no config.json; give a GPT-2's folder, or hf:owner/name"
        ) from None
    except KeyError as error:
        raise CheckpointError("path", f"{file} has no {error}: not a GPT-2 config") from None
    # int(Infinity) raises OverflowError, and deeply nested brackets raise RecursionError.
    except (OSError, ValueError, TypeError, AttributeError, ArithmeticError, RecursionError) as e:
        raise CheckpointError("path", f"{file} cannot be used ({str(e)[:200]})") from None
    return sizes | {"qkv_bias": True}


def load(folder: Path) -> GPT:
    """Load the GPT-2 in `folder` with MultiHeadAttention, in eval mode.

    Raises CheckpointError if a file is missing or damaged, or the weights do not fit config.json.
    """
    sizes = read_config(folder)
    weights = _weights(folder / "model.safetensors", sizes)
    d_model, heads, context = sizes["d_model"], sizes["num_heads"], sizes["context_length"]
    try:
        model = GPT(
            vocab_size=sizes["vocab_size"],
            context_length=context,
            d_model=d_model,
            num_layers=sizes["num_layers"],
            attention=lambda layer: MultiHeadAttention(
                d_model, d_model, context, heads, qkv_bias=True
            ),
            input_position=LearnedPosition(context, d_model),
            d_mlp=sizes["d_mlp"],
            dropout=0.0,
        )
    except ValueError as error:
        raise CheckpointError("path", f"{folder / 'config.json'}: {error}") from None
    _fill(model, weights, folder / "model.safetensors")
    return model.eval()


def _weights(file: Path, sizes: dict[str, Any]) -> dict[str, Tensor]:
    """Return the file's tensors by GPT-2's names.

    Raises CheckpointError if names or shapes do not fit `sizes`. Only the header is read for this
    check, since the tensors or a model of these sizes could need any amount of memory.
    """
    try:
        with opened(file) as opened_file:
            header = outline(opened_file)
    except CheckpointError as error:
        raise CheckpointError("path", error.message) from None
    named = {name.removeprefix(PREFIX): tensor for name, tensor in header.items()}
    named = {k: v for k, v in named.items() if not f".{k}".endswith(SKIPPED)}
    for name, tensor in named.items():
        if not tensor.is_floating_point():
            raise CheckpointError(
                "path", f"{file}: {name[:80]} is {tensor.dtype}, not floating-point"
            )
    shapes = {name: list(tensor.shape) for name, tensor in named.items()}
    count = sizes["num_layers"]
    layers = {match[1] for name in shapes if (match := re.match(r"h\.(\d+)\.", name))}
    if len(layers) < count:
        raise CheckpointError(
            "path", f"{file} lacks h.{len(layers)}: config.json has {count} layers"
        )
    expected = _shapes(sizes)
    for name in [*expected, *shapes]:
        if name not in shapes:
            raise CheckpointError("path", f"{file} lacks {name}")
        if name not in expected:
            raise CheckpointError("path", f"{file} has an unknown {name[:100]!r}")
        if shapes[name] != expected[name]:
            raise CheckpointError("path", f"{file}: {name} is {shapes[name]}, not {expected[name]}")
    found = read_tensors(file, [k for k in header if k.removeprefix(PREFIX) in shapes])
    return {name.removeprefix(PREFIX): tensor for name, tensor in found.items()}


def _shapes(sizes: dict[str, Any]) -> dict[str, list[int]]:
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


@torch.no_grad()
def _fill(model: GPT, theirs: dict[str, Tensor], file: Path) -> None:
    """Put GPT-2's weights into `model`, which has the same sizes and MultiHeadAttention.

    Raises CheckpointError for a name or a shape that does not fit.
    """
    own = model.state_dict()

    def take(name: str, shape: torch.Size | tuple[int, ...]) -> Tensor:
        if name not in theirs:
            raise CheckpointError("path", f"{file} lacks {name}")
        tensor = theirs.pop(name)
        tensor = tensor.T if name.endswith(TRANSPOSED) else tensor
        if tensor.shape != shape:
            raise CheckpointError(
                "path", f"{file}: {name} is {list(tensor.shape)}, not {list(shape)}"
            )
        return tensor

    for ours, name in _names(model).items():
        own[ours].copy_(take(name, own[ours].shape))
    for layer, block in enumerate(model.layers()):
        attention = block.attention
        assert isinstance(attention, MultiHeadAttention)
        E, D = attention.d_in, attention.head_dim
        name = f"h.{layer}.attn"
        qkv = take(f"{name}.c_attn.weight", (E, 3 * E)).T.unflatten(0, (3, -1, D))
        bias = take(f"{name}.c_attn.bias", (3 * E,)).unflatten(0, (3, -1, D))
        out = take(f"{name}.c_proj.weight", (E, E)).T.unflatten(1, (-1, D))
        out_bias = take(f"{name}.c_proj.bias", (E,))
        (q, k, v), (q_bias, k_bias, v_bias) = qkv, bias
        heads = HeadWeights(q, k, v, q_bias, k_bias, v_bias, out, out_bias)
        attention.load_heads(heads)
    if theirs:
        raise CheckpointError("path", f"{file} has an unknown {sorted(theirs)[0]}")


@torch.no_grad()
def write(folder: Path, model: GPT) -> None:
    """Write a folder that `transformers.GPT2LMHeadModel.from_pretrained` opens.

    Raises ConfigError for a model that is no GPT-2: fewer key/value heads than query heads, no
    learned positions, no qkv bias, no output projection, attention parameters beyond these, or an
    attention that computes something else from the same heads.
    """
    own = model.state_dict()
    if "input_position.embedding.weight" not in own:
        raise ConfigError("to", "GPT-2 has learned positions, but this model has none")
    weights = {}
    for ours, name in _names(model).items():
        tensor = own[ours].T if name.endswith(TRANSPOSED) else own[ours]
        weights[f"transformer.{name}"] = tensor
    for layer, block in enumerate(model.layers()):
        try:
            w = heads_of(block.attention).export_heads()
            refuse_loss(block.attention, set())
        except ValueError as error:
            raise ConfigError("to", f"layer {layer}: {error}") from None
        if len(w.k_GDE) != len(w.q_HDE):
            raise ConfigError("to", "GPT-2 has a key/value head for each query head; convert first")
        if w.q_bias_HD is None or w.k_bias_GD is None or w.v_bias_GD is None:
            raise ConfigError("to", "GPT-2 has qkv biases, but this model has none")
        if w.out_EHD is None or w.out_bias_E is None:
            raise ConfigError("to", "GPT-2 has an output projection, but this model has none")
        if not _attends_as_gpt2(block.attention, w):
            raise ConfigError(
                "to",
                f"layer {layer}: the same heads give other outputs in GPT-2, whose scores have no "
                "scale but head_dim ** -0.5, no window and no soft cap",
            )
        name = f"transformer.h.{layer}.attn"
        qkv = torch.cat([t.flatten(0, 1) for t in (w.q_HDE, w.k_GDE, w.v_GDE)])
        bias = torch.cat([t.flatten() for t in (w.q_bias_HD, w.k_bias_GD, w.v_bias_GD)])
        weights[f"{name}.c_attn.weight"] = qkv.T
        weights[f"{name}.c_attn.bias"] = bias
        weights[f"{name}.c_proj.weight"] = w.out_EHD.flatten(1).T
        weights[f"{name}.c_proj.bias"] = w.out_bias_E
    config = json.dumps(_config(model), indent=2) + "\n"
    write_weights(folder / "model.safetensors", weights)
    write_atomically(folder / "config.json", lambda file: file.write(config.encode()))


def _attends_as_gpt2(attention: Attention, weights: HeadWeights) -> bool:
    """Whether GPT-2's attention gives the same outputs from these heads.

    Asked of numbers, as a variant may change scores in any way. The inputs are ten times what a
    layer norm gives, so that a soft cap takes hold.
    """
    d, T, (heads, *_) = attention.d_in, attention.context_length, weights.q_HDE.shape
    plain = MultiHeadAttention(d, d, T, heads, qkv_bias=True).to(weights.q_HDE)
    plain.load_heads(weights)
    x_BTE = 10 * torch.randn(1, T, d, generator=torch.Generator().manual_seed(0))
    x_BTE = x_BTE.to(weights.q_HDE)
    own, expected = attention.eval()(x_BTE), plain.eval()(x_BTE)
    return bool((own - expected).abs().max() <= 1e-3 * expected.std())


def _heads(model: GPT) -> int:
    return len(heads_of(model.layers()[0].attention).export_heads().q_HDE)


def _names(model: GPT) -> dict[str, str]:
    """Our name -> GPT-2's name of every weight outside the attention."""
    names = dict(OUTER)
    for layer in range(len(model.blocks)):
        names |= {f"blocks.{layer}.{o}": f"h.{layer}.{t}" for o, t in PER_LAYER.items()}
    return names


def _config(model: GPT) -> dict[str, Any]:
    d_model = model.token_embedding.embedding_dim
    end = GPT2_END if model.vocab_size > GPT2_END else None
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_layer": len(model.blocks),
        "n_head": _heads(model),
        "n_embd": d_model,
        "n_inner": model.layers()[0].d_mlp,
        "n_positions": model.context_length,
        "vocab_size": model.vocab_size,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": end,
        "eos_token_id": end,
    }
