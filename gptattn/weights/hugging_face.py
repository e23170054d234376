"""Reads and writes Hugging Face checkpoint folders: config.json and tensors in safetensors."""

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from gptattn.attention import Attention
from gptattn.build.model import build_model
from gptattn.data.bpe import ByteLevelBPE
from gptattn.data.hf_tokenizer import FILE, find_file
from gptattn.errors import DAMAGE, CheckpointError, ConfigError, DataError, NumericError
from gptattn.machine.disk import write_atomically
from gptattn.model.gpt import GPT
from gptattn.runs.tensor_file import read_tensors, write_tensors
from gptattn.settings.config import TrainConfig
from gptattn.settings.layers import quote
from gptattn.weights.convert import check_heads, convert, describe_model
from gptattn.weights.families import FAMILIES, GPT2, HEAD, Family, as_overrides

CONFIG, WEIGHTS = "config.json", "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"  # of weights split into several files
# Patterns of the files fetched from the hub.
FILES = (CONFIG, WEIGHTS, INDEX, "model-*-of-*.safetensors", FILE)
GPT2_END = 50256  # <|endoftext|>
TRIAL_TOKENS = 1024  # of the numerical comparison, whose scores are T x T


def find_family(folder: Path) -> Family | None:
    """Return the family of the checkpoint in `folder`, or None if it has no config.json.

    Raises CheckpointError if its config.json is damaged or names another kind of model.
    """
    file = folder / CONFIG
    if not file.is_file():
        return None
    try:
        # The original GPT-2 has no model_type.
        name = json.loads(file.read_bytes()).get("model_type", GPT2.name)
        if name not in FAMILIES:
            raise ValueError(f"model_type is {name!r:.60}, but must be one of {[*FAMILIES]}")
    except DAMAGE as error:
        raise _unusable(file, error) from None
    return FAMILIES[name]


def find_tokenizer(folder: Path, family: Family) -> str | None:
    """Return the choice in conf/tokenizer for the folder's tokenizer; None if it has none."""
    if find_file(folder) is None:
        return None
    try:
        ByteLevelBPE(str(folder))
    except DataError:  # most Llamas have another kind
        return "gpt2" if family is GPT2 else "hf"
    return "gpt2"


@torch.no_grad()
def load_checkpoint(folder: Path, family: Family) -> tuple[TrainConfig, GPT]:
    """Load the settings and the model in `folder`, in eval mode and float32, on the CPU.

    Without a tokenizer.json, the settings have the byte tokenizer. Raises CheckpointError if a file
    is missing or damaged, or the weights do not fit config.json; NumericError for a weight that is
    not finite.
    """
    file = folder / CONFIG
    tokenizer = ["tokenizer=byte"]
    if choice := find_tokenizer(folder, family):
        tokenizer = [f"tokenizer={choice}", f"tokenizer.path={quote(str(folder))}"]
    try:
        cfg = family.make_settings(family.read_values(json.loads(file.read_bytes())), tokenizer)
        assert cfg.model.vocab_size is not None
        model = build_model(cfg, cfg.model.vocab_size)
    except (*DAMAGE, ConfigError) as error:
        raise _unusable(file, error) from None
    # The file can also contain a tied head.
    skipped = (*family.skipped, *([f".{HEAD}.weight"] if cfg.block.tied_head else []))
    weights = read_weights(folder, family.prefix, skipped)
    for name, parts in group_by_name(family, model.state_dict()).items():
        if name not in weights:
            raise CheckpointError("path", f"{folder} lacks {name}")
        read, expected = weights.pop(name), transpose(family, name, torch.cat(parts)).shape
        if read.shape != expected:
            shapes = f"{list(read.shape)}, not {list(expected)}"
            raise CheckpointError("path", f"{folder}: {name} has shape {shapes}")
        if not torch.isfinite(read).all():
            raise NumericError("path", f"{folder}: {name} has NaN or infinity; use other weights")
        sizes = [len(part) for part in parts]
        for part, own in zip(parts, transpose(family, name, read).split(sizes), strict=True):
            part.copy_(own)
    for name in weights:
        raise CheckpointError("path", f"{folder} has an unknown tensor {name[:100]!r}")
    return cfg, model.eval()


@torch.no_grad()
def write_checkpoint(folder: Path, cfg: TrainConfig, model: GPT) -> None:
    """Write a folder that transformers opens: a Llama or Qwen2 for RMSNorm, otherwise a GPT-2.

    The model is converted to the family's attention. Raises ConfigError if the family cannot
    represent it: another block, head or positions, an attention with other parameters, or one that
    computes something else from the same heads.
    """
    heads = [one.export_heads() for one in check_heads(model, cfg)]
    values = describe_model(model, cfg)
    family = GPT2
    if cfg.block.norm == "rms":
        family = FAMILIES["qwen2" if values["model.qkv_bias"] else "llama"]
    wanted = {name: v for name, v in family.fixed.items() if values.get(name, v) != v}
    if wanted:
        present = " ".join(as_overrides({name: values[name] for name in wanted}))
        needed = " ".join(as_overrides(wanted))
        raise ConfigError("to", f"this model has {present}, but {family.name} needs {needed}")
    # If a layer has fewer key/value heads, `convert` copies them, which does not change outputs.
    values["attn.num_kv_heads"] = max(len(one.k_GDE) for one in heads)
    given = {name: values[name] for name in family.settings if name in values}
    plain = build_model(family.make_settings(given, []), model.vocab_size).to(model.head.weight)
    convert(model, plain)
    for layer, (own, other) in enumerate(zip(model.layers(), plain.layers(), strict=True)):
        if not attend_alike(own.attention, other.attention):
            raise ConfigError(
                "to",
                f"layer {layer}: the same heads give different outputs in {family.name}, which "
                "scales scores by head_dim ** -0.5 and has no window, soft cap or part",
            )
    end = GPT2_END if family is GPT2 and model.vocab_size > GPT2_END else None
    config = {
        "architectures": [family.architecture],
        "model_type": family.name,
        **{key: allowed[0] for key, allowed in family.accepted.items()},
        **{key: values[name] for name, key in family.settings.items()},
        "bos_token_id": end,
        "eos_token_id": end,
    }
    weights = {}
    for name, parts in group_by_name(family, plain.state_dict()).items():
        prefix = "" if name.startswith(HEAD) else family.prefix
        weights[prefix + name] = transpose(family, name, torch.cat(parts))
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / WEIGHTS, weights, {})
    text = json.dumps(config, indent=2) + "\n"
    write_atomically(folder / CONFIG, lambda file: file.write(text.encode()))


def attend_alike(attention: Attention, plain: Attention) -> bool:
    """Whether both give the same outputs.

    It compares outputs, because a variant can change scores in any way. The inputs are ten times
    what a norm gives, which makes a soft cap visible.
    """
    longest = attention.context_length
    T, w = min(longest, TRIAL_TOKENS), next(plain.parameters())
    x_BTE = torch.randn(1, T, attention.d_in, generator=torch.Generator().manual_seed(0))
    x_BTE = 10 * x_BTE.to(w)
    own, expected = attention.eval()(x_BTE), plain.eval()(x_BTE)
    alike = bool((own - expected).abs().max() <= 1e-3 * expected.std())
    # Compares all pairs, also those beyond the trial.
    return alike and attention.flops(longest, longest) == plain.flops(longest, longest)


def group_by_name(family: Family, ours: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    """Return our tensors that make up each of theirs, in order."""
    groups: dict[str, list[Tensor]] = defaultdict(list)
    for name, tensor in ours.items():
        groups[family.rename(name)].append(tensor)
    return groups


def transpose(family: Family, name: str, tensor: Tensor) -> Tensor:
    """Swap the axes of a matrix that the family stores transposed, in either direction."""
    return tensor.T if tensor.ndim == 2 and name.startswith(family.transposed) else tensor


def read_weights(folder: Path, prefix: str, skipped: tuple[str, ...]) -> dict[str, Tensor]:
    """Return the folder's tensors, except those whose names end as in `skipped`.

    They are memory-mapped, with the prefix removed from their names. Raises CheckpointError if a
    file is missing or damaged.
    """
    files, index = [WEIGHTS], folder / INDEX
    if index.is_file() and not (folder / WEIGHTS).exists():
        try:
            # Only names: the files must lie in this folder, whatever the index says.
            files = sorted(
                {Path(name).name for name in json.loads(index.read_bytes())["weight_map"].values()}
            )
        except DAMAGE as error:
            raise _unusable(index, error) from None
    found: dict[str, Tensor] = {}
    for file in files:
        try:
            here = read_tensors(folder / file)
        except CheckpointError as error:
            raise CheckpointError("path", error.message) from None
        found |= {name.removeprefix(prefix): tensor for name, tensor in here.items()}
    return {name: tensor for name, tensor in found.items() if not f".{name}".endswith(skipped)}


def _unusable(file: Path, error: BaseException) -> CheckpointError:
    reason = f"no key {error}" if isinstance(error, KeyError) else str(error).partition("\n")[0]
    return CheckpointError("path", f"{file} cannot be used ({reason[:200]})")
