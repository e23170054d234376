"""Checks of values: the ranges and choices beside a field, and the types a constructor declares."""

import difflib
import math
import re
import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from omegaconf import OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from gptattn.errors import ConfigError

T = TypeVar("T")

RANGE, CHOICES = "range", "choices"  # keys of a field's metadata
AUTO = {CHOICES: ("auto",)}
REMOVED = "cannot be removed; give it a value instead"
TYPE_NAMES: dict[Any, str] = {
    type(None): "null",
    float: "a number",
    int: "a whole number",
    bool: "true or false",
}
# Our choice or setting -> its names elsewhere, where difflib would find nothing, or another.
NAMES_ELSEWHERE = {
    "mha": "multihead multi_head vanilla standard full",
    "gqa": "grouped grouped_query",
    "mqa": "multiquery multi_query",
    "sliding": "swa local windowed",
    "mla": "latent deepseek",
    "gated_deltanet": "gdn linear delta deltanet",
    "kda": "kimi kimi_delta",
    "mamba2": "mamba ssm ssd",
    "lightning": "minimax lightning_attention",
    "attn.backend=sdpa": "flash flash_attention flashattention flash_attn fused",
    "rope": "rotary",
    "learned": "absolute trained",
    "sinusoidal": "sin sine fixed",
    "hf": "huggingface hub",
    "data=hf data.name=OWNER/NAME": "wikitext openwebtext fineweb tinystories c4 the_pile",
    "gpu": "cuda",
    "attn": "attention",
    "part": "parts",
    "data": "dataset",
    "trainer": "device accelerator",
    "model.num_layers": "layer layers n_layer n_layers depth",
    "model.num_heads": "head heads n_head n_heads",
    "attn.num_kv_heads": "kv_heads n_kv_heads n_kv_head",
    "model.d_model": "n_embd width dim emb_dim embed_dim hidden_size",
    "model.d_mlp": "d_ff ffn_dim intermediate_size",
    "model.mlp": "activation",
    "model.context_length": "block_size seq_len seq_length max_seq_len n_ctx context",
    "optim.lr": "learning_rate rate",
    "optim.warmup_fraction": "warmup warmup_steps",
    "budget.steps": "epochs max_steps max_iters iters iterations",
    "budget.seconds": "minutes time",
    "batch_size": "batch",
    "data.path": "file text_file",
    "experiment_name": "experiment_dir name",
    "run_dir": "out out_dir output_dir logdir",
}
# Recipes that are asked for, and why there is none.
NO_RECIPE = {
    name: "its attention has not been reproduced here against another implementation; "
    f"recipe={near} is the nearest"
    for name, near in (("gemma4", "gemma3"), ("deepseek_v4", "deepseek_v3"))
}
OURS = {word: ours for ours, words in NAMES_ELSEWHERE.items() for word in words.split()}


@dataclass(frozen=True)
class Range:
    """The numbers that a setting accepts; never infinity or NaN.

    `above` and `below` are exclusive bounds, `least` and `most` inclusive.
    """

    above: float = -math.inf
    least: float = -math.inf
    below: float = math.inf
    most: float = math.inf


def within(**limits: Any) -> dict[str, Any]:
    """Return the metadata of a field with this Range: `field(metadata=within(least=0))`."""
    return {RANGE: Range(**limits)}


def one_of(words: Any) -> dict[str, Any]:
    """Return the metadata of a str field that takes one of the words of this Literal."""
    return {CHOICES: get_args(words)}


def check_values(settings: Any, path: str = "") -> None:
    """Raise ConfigError, naming the field, for the first value outside its range or choices."""
    for one in fields(settings):
        name, value = f"{path}{one.name}", getattr(settings, one.name)
        limits, choices = one.metadata.get(RANGE), one.metadata.get(CHOICES)
        if is_dataclass(value):
            check_values(value, f"{name}.")
        elif isinstance(value, str) and choices is not None and value not in choices:
            if limits is not None:
                words = " or ".join(choices)
                raise ConfigError(name, f"{value!r} is not a number; give one, or {words}")
            raise ConfigError(name, f"{value!r} is unknown; {suggest(value, choices)}")
        elif isinstance(value, int | float) and limits is not None:
            if math.isfinite(value) and value > limits.most:
                raise ConfigError(name, f"{value} is too large; at most {limits.most}")
            if limits.above < value < limits.below and limits.least <= value <= limits.most:
                continue
            positive = limits.above == 0 and limits.below == math.inf
            wrong = "is not a positive number" if positive else "is out of range"
            start = f"{limits.least:g} or more"
            if limits.least == -math.inf:
                start = f"one above {limits.above:g}"
            end = "" if limits.below == math.inf else f", below {limits.below:g}"
            raise ConfigError(name, f"{value} {wrong}; give {start}{end}")


def build_dataclass(kind: type[T], node: Any) -> T:
    """Build the dataclass `kind` from a tree of plain values, such as a run's config.yaml.

    Records older than a setting lack it, so its default must be what runs did before it existed.
    Raises ConfigError, naming the field, for an unknown or missing name and for a wrong type.
    """
    try:
        if OmegaConf.is_config(node):  # as plain values, so that an added name is found
            node = OmegaConf.to_container(node, resolve=True)
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), node))  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        raise explain_omegaconf_error(error) from error


def explain_omegaconf_error(
    error: OmegaConfBaseException, names: Sequence[str] = ()
) -> ConfigError:
    """Return the ConfigError for OmegaConf's error about a setting.

    `names`: those of all settings, with dots, one of which may be meant.
    """
    field = str(error.full_key or error.key or "config")
    message = (error.msg or str(error)).splitlines()[0]
    if isinstance(error, ConfigKeyError | ConfigAttributeError):
        if not names and is_dataclass(error.object_type):
            above = field.rpartition(".")[0] + "." * ("." in field)
            names = [f"{above}{one.name}" for one in fields(error.object_type)]
        near = find_settings(field, names)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        message = f"is not a setting; {hint}--help lists them all"
    elif isinstance(error, MissingMandatoryValue):
        message = "is missing; give a value"
    elif "is not Optional" in message:
        message = "is null; give a value"
    elif "is not a ListConfig" in message:
        message = f"is not a list; write {field}=[a,b]"
    elif "does not support deletion" in message:
        message = REMOVED
    return ConfigError(field, message)


def check_type(field: str, value: Any, hint: Any) -> None:
    """Raise ConfigError if `value` is not of the type `hint`, as a constructor declares it."""
    hints = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    words = [word for one in hints if get_origin(one) is Literal for word in get_args(one)]
    kinds = [get_origin(one) or one for one in hints if get_origin(one) is not Literal]
    # isinstance would take True for an int. An int will do where a float is declared.
    if Any in kinds or type(value) in kinds or (type(value) is int and float in kinds):
        return
    if isinstance(value, str) and value in words:
        return
    if words and str not in kinds:
        raise ConfigError(field, f"{str(value)!r} is unknown; {suggest(str(value), words)}")
    taken = [TYPE_NAMES.get(kind, getattr(kind, "__name__", str(kind))) for kind in kinds]
    kind = type(value).__name__
    what = "is null" if value is None else f"{value!r} is {'an' if kind == 'int' else 'a'} {kind}"
    raise ConfigError(field, f"{what}; give {' or '.join([*words, *taken])}")


def find_settings(name: str, names: Sequence[str]) -> list[str]:
    """Return which of the settings `names` is meant by a name that is none; several if unclear."""
    last = name.rpartition(".")[2]
    meant = _translate(last)
    if meant in names:
        return [meant]
    same = [one for one in names if one.rpartition(".")[2] == last]
    if same:
        return same
    lasts = {one.rpartition(".")[2]: one for one in reversed(names)}
    near = difflib.get_close_matches(last, lasts, n=1)
    return difflib.get_close_matches(name, names, n=1) or [lasts[one] for one in near]


def suggest(value: str, choices: Iterable[str]) -> str:
    """Return `did you mean X? one of ...`, or only the list if no choice is close."""
    choices = sorted(choices)
    if not choices:
        return "there is none"
    meant = _translate(value)
    near = [one for one in (meant, re.split("[.=]", meant)[-1]) if one in choices]
    near = near or ([meant] if "=" in meant else [])
    near = near or difflib.get_close_matches(value, choices, n=1, cutoff=0.5)
    listed = f"one of {', '.join(choices)}"
    return f"did you mean {near[0]}? {listed}" if near else listed


def _translate(name: str) -> str:
    return OURS.get(name.lower().replace("-", "_"), "")
