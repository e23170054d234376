"""Checks of values: the types, ranges and choices that a field or a constructor declares."""

import difflib
import math
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from gptattn.errors import ConfigError

T = TypeVar("T")

TYPE_NAMES = {  # msgspec's -> ours
    "float": "a number",
    "int": "a whole number",
    "bool": "true or false",
    "str": "a string, such as a name or path",
    "array": "a list, such as [a,b]",
    "object": "a table, such as {name:value}",
}
# Our choice or setting -> its names elsewhere, for which difflib finds nothing or something else.
NAMES_ELSEWHERE = {
    "mha": "multihead multi_head vanilla standard full",
    "gqa": "grouped grouped_query",
    "mqa": "multiquery multi_query",
    "sliding": "swa local windowed",
    "mla": "latent deepseek",
    "gated_deltanet": "gdn linear delta deltanet",
    "kda": "kimi kimi_delta",
    "mamba2": "mamba ssm ssd",
    "rwkv7": "rwkv goose",
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
    "experiment_name": "experiment_dir",
    "run_dir": "out out_dir output_dir logdir",
}
OURS = {word: ours for ours, words in NAMES_ELSEWHERE.items() for word in words.split()}


@cache
def list_hints(kind: Any) -> dict[str, Any]:
    """Return the types of a dataclass's fields by name, each with what `Annotated` adds."""
    return get_type_hints(kind, include_extras=True)


def bare(hint: Any) -> Any:
    """Return a type without what `Annotated` adds."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def build_dataclass(kind: type[T], node: Any, path: str = "") -> T:
    """Build the dataclass `kind` from a tree of plain values, such as a run's config.yaml.

    Raises ConfigError, naming the field, for an unknown or missing name, a wrong type, and a number
    out of range.
    """
    if not isinstance(node, Mapping):
        what = "is null" if node is None else f"{node!r} is not a table"
        raise ConfigError(path.rstrip("."), f"{what}; give {path}NAME=VALUE")
    hints = list_hints(kind)
    for key in node:
        if key not in hints:
            names = [f"{path}{name}" for name in hints]
            raise ConfigError(f"{path}{key}", describe_unknown(f"{path}{key}", names))
    values = {}
    for one in fields(kind):  # type: ignore[arg-type]
        name, hint = f"{path}{one.name}", hints[one.name]
        if one.name in node:
            value = node[one.name]
            if is_dataclass(bare(hint)):
                values[one.name] = build_dataclass(bare(hint), value, f"{name}.")
            else:
                values[one.name] = _build_value(name, value, hint)
        elif one.default is MISSING and one.default_factory is MISSING:
            raise ConfigError(name, "is missing; give a value")
    return kind(**values)


def _build_value(field: str, value: Any, hint: Any) -> Any:
    kinds = _list_options(hint)
    if str in kinds and type(value) in (int, float):  # such as experiment_name=3
        value = str(value)
    of = next((get_args(kind)[-1] for kind in kinds if get_origin(kind) is type(value)), None)
    if isinstance(value, list) and of is not None:
        return [_build_value(f"{field}[{i}]", one, of) for i, one in enumerate(value)]
    if isinstance(value, dict) and of is not None:
        return {key: _build_value(f"{field}.{key}", one, of) for key, one in value.items()}
    return check_type(field, value, hint)


def _list_options(hint: Any) -> list[Any]:
    """Return the types in a union, or the only one."""
    hint = bare(hint)
    is_union = get_origin(hint) in (Union, types.UnionType)
    return [bare(one) for one in get_args(hint)] if is_union else [hint]


def check_type(field: str, value: Any, hint: Any) -> Any:
    """Return the value as the type `hint`, as a field or a constructor declares it.

    An int passes for a float. Raises ConfigError, naming the field, for a value of another type,
    out of range, infinite, or not among the choices.
    """
    try:
        converted = msgspec.convert(value, hint)
    except TypeError:  # a library's type, which msgspec does not know
        return value
    except msgspec.ValidationError as error:
        literals = [kind for kind in _list_options(hint) if get_origin(kind) is Literal]
        words = [str(word) for kind in literals for word in get_args(kind)]
        expected = re.match("Expected `(.*?)`([^,`]*?)(,| - at|$)", str(error))
        if expected is None:
            words += [TYPE_NAMES["int"]] if int in _list_options(hint) else []
            raise ConfigError(
                field, f"{value!r} is unknown; {suggest(str(value), words)}"
            ) from None
        names = TYPE_NAMES | ({"str": " or ".join(words)} if words else {})
        kinds = " or ".join(names.get(kind, kind) for kind in expected[1].split(" | "))
        typed = "null" if value is None else f"{value!r:.60}"
        raise ConfigError(field, f"is {typed}; give {kinds}{expected[2]}") from None
    if isinstance(converted, float) and math.isinf(converted):
        raise ConfigError(field, f"is {converted}; give a finite number")
    return converted


def describe_unknown(name: str, names: Sequence[str]) -> str:
    """Return the message about a name that is not a setting; it suggests the likeliest names."""
    names = [one for one in names if one != name]
    last, lasts = name.rpartition(".")[2], {one.rpartition(".")[2]: one for one in reversed(names)}
    meant = _translate(last)
    near = [meant] if meant in names else [one for one in names if one.rpartition(".")[2] == last]
    near = near or difflib.get_close_matches(name, names, n=1)
    near = near or [lasts[one] for one in difflib.get_close_matches(last, lasts, n=1)]
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return f"is not a setting; {hint}--help lists them all"


def suggest(value: str, choices: Iterable[str]) -> str:
    """Return `did you mean X? give one of ...`, or only the list if none is close."""
    choices = sorted({*choices})
    if not choices:
        return "there are no choices"
    meant = _translate(value)
    near = [one for one in (meant, re.split("[.=]", meant)[-1]) if one in choices]
    near = near or ([meant] if "=" in meant else [])
    near = near or difflib.get_close_matches(value, choices, n=1, cutoff=0.5)
    listed = f"give one of {', '.join(choices)}"
    return f"did you mean {near[0]}? {listed}" if near else listed


def _translate(name: str) -> str:
    return OURS.get(name.lower().replace("-", "_"), "")
