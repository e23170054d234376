"""Builds objects from settings: `_target_` names a class or function, other keys its arguments."""

import contextlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, get_type_hints

from gptattn.attention.base import Attention
from gptattn.data.corpus import Corpus
from gptattn.data.text import cache_folder
from gptattn.data.tokenizer import Tokenizer
from gptattn.data.tokens import TokenData, load_tokens
from gptattn.errors import ConfigError
from gptattn.model.gpt import GPT
from gptattn.position.base import HeadPosition, InputPosition
from gptattn.settings.config import ModelConfig, Spec, TrainConfig
from gptattn.settings.targets import HOMES, check_name
from gptattn.settings.values import check_type, suggest

# Argument of a constructor -> the setting that fills it, which an error must name.
SETTING_OF = {
    "d_in": "model.d_model",
    "d_out": "model.d_model",
    "num_heads": "model.num_heads",
    "head_dim": "model.num_heads",
    "context_length": "model.context_length",
    "dropout": "model.dropout",
}


def build_model(cfg: TrainConfig, vocab_size: int) -> GPT:
    """Build the GPT of these settings, on torch's current default device.

    Raises ConfigError, naming the field, if it cannot be built.
    """
    model = cfg.model
    check_vocabulary(cfg, vocab_size)
    position = _build_position(cfg)
    in_heads = position if isinstance(position, HeadPosition) else None
    in_input = position if isinstance(position, InputPosition) else None
    return GPT(
        vocab_size=model.vocab_size or vocab_size,
        context_length=model.context_length,
        d_model=model.d_model,
        num_layers=model.num_layers,
        attention=partial(_build_attention, cfg, in_heads),
        input_position=in_input,
        d_mlp=4 * model.d_model if model.d_mlp is None else model.d_mlp,
        dropout=model.dropout,
    )


def check_vocabulary(cfg: TrainConfig, vocab_size: int) -> None:
    """Raise ConfigError if the model has fewer ids than the tokenizer."""
    given = cfg.model.vocab_size
    if given is not None and given < vocab_size:
        raise ConfigError(
            "model.vocab_size",
            f"{given} is below the tokenizer's {vocab_size}; give that many or more, or null",
        )


def build_tokenizer(cfg: TrainConfig) -> Tokenizer:
    """Build the tokenizer; if its vocabulary comes from the text, it has none yet.

    Raises ConfigError or DataError, naming the field.
    """
    tokenizer = construct("tokenizer", cfg.tokenizer, {}, cfg.allow_targets)
    if not isinstance(tokenizer, Tokenizer):
        raise ConfigError("tokenizer._target_", "is not a gptattn.data.tokenizer.Tokenizer")
    return tokenizer


def build_data(cfg: TrainConfig, tokenizer: Tokenizer | None = None) -> TokenData:
    """Load the text of these settings and tokenize it; `tokenizer`: one that is built already.

    Raises DataError or ConfigError, naming the field, or DiskError if the cache cannot be used.
    """
    return load_tokens(
        partial(_build_text, cfg),
        tokenizer or build_tokenizer(cfg),
        context_length=cfg.model.context_length,
        val_fraction=cfg.validation.fraction,
        cache=cache_folder(cfg.cache_dir),
    )


def _build_text(cfg: TrainConfig) -> str | Corpus:
    text = construct("data", cfg.data, {"cache_dir": cfg.cache_dir}, cfg.allow_targets)
    if not isinstance(text, str | Corpus):
        raise ConfigError(
            "data._target_", "does not give text; name a function that returns a str or a Corpus"
        )
    return text


def _build_position(cfg: TrainConfig) -> HeadPosition | InputPosition | None:
    if not cfg.position:
        return None
    model = cfg.model
    takes = inspect.signature(find_target("attn", cfg.attn, cfg.allow_targets)).parameters
    heads = cfg.attn.get("num_heads", model.num_heads) if "num_heads" in takes else 1
    if type(heads) is not int or heads < 1:
        raise ConfigError("attn.num_heads", f"{heads!r} is not a positive whole number")
    shared = {
        "context_length": model.context_length,
        "d_model": model.d_model,
        "num_heads": heads,
        "head_dim": model.d_model // heads,
    }
    position = construct("position", cfg.position, shared, cfg.allow_targets)
    if not isinstance(position, (HeadPosition, InputPosition)):
        raise ConfigError("position._target_", "is neither a HeadPosition nor an InputPosition")
    if isinstance(position, HeadPosition) and "position" not in takes:
        raise ConfigError(
            "position",
            f"{cfg.choices['position']} acts in the attention, and attn={cfg.variant} takes no "
            "position; use position=learned",
        )
    return position


def _build_attention(cfg: TrainConfig, position: HeadPosition | None, layer: int) -> Attention:
    for name in ("d_in", "d_out", "context_length"):
        if name in cfg.attn:
            raise ConfigError(
                f"attn.{name}", f"comes from the model; set {SETTING_OF[name]} instead"
            )
    shared = shared_arguments(cfg.model) | {"position": position, "layer": layer}
    attention = construct("attn", cfg.attn, shared, cfg.allow_targets)
    if not isinstance(attention, Attention):
        raise ConfigError("attn._target_", "is not a gptattn.attention.Attention")
    # A variant may check an argument only in `rule()`, which making a cache calls.
    with _named_arguments("attn", cfg.attn):
        attention.new_cache(1, 1)
    return attention


def shared_arguments(model: ModelConfig) -> dict[str, Any]:
    """Return the arguments that an attention gets, beside its YAML's keys, if it declares them.

    It can also declare `position`, a HeadPosition or None, and `layer`, counted from 0.
    """
    return {
        "d_in": model.d_model,
        "d_out": model.d_model,
        "context_length": model.context_length,
        "num_heads": model.num_heads,
        "dropout": model.dropout,
        "qkv_bias": model.qkv_bias,
    }


def find_target(group: str, spec: Spec, allow_targets: Sequence[str]) -> Callable[..., Any]:
    """Import the class or function that `spec` names, from the group's package or an allowed one.

    Raises ConfigError if it does not exist, is abstract, or lies in another package.
    """
    packages = [HOMES.get(group, "gptattn"), *allow_targets]
    target: Any = spec.get("_target_")
    check_name(f"{group}._target_", target, packages)
    try:
        found = pkgutil.resolve_name(target)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{group}._target_", f"{target} cannot be imported ({error}); give package.module.Class"
        ) from None
    # `mypackage.os.system` begins with an allowed package but is `os`: check where it was defined.
    home = f"{getattr(found, '__module__', '')}."
    if inspect.isabstract(found):
        raise ConfigError(f"{group}._target_", f"{target} is abstract; name a subclass")
    if not callable(found) or not any(home.startswith(f"{package}.") for package in packages):
        raise ConfigError(
            f"{group}._target_", f"{target} is not a class or function of {', '.join(packages)}"
        )
    return found


def construct(group: str, spec: Spec, shared: dict[str, Any], allow_targets: Sequence[str]) -> Any:
    """Call the target of `spec` with the keys of `spec`, and those of `shared` that it declares.

    Raises ConfigError, naming the field, for an unknown key, a wrong type or a missing argument,
    and if the target raises a ValueError; its message should begin with `argument=`.
    """
    target = find_target(group, spec, allow_targets)
    own = {key: value for key, value in spec.items() if key != "_target_"}
    parameters = inspect.signature(target).parameters
    hints = get_type_hints(target.__init__ if inspect.isclass(target) else target)
    for key, value in own.items():
        if key not in parameters:
            raise ConfigError(
                f"{group}.{key}",
                f"{target.__name__} takes no such argument; "
                f"{suggest(key, [p for p in parameters if p not in shared])}",
            )
        check_type(f"{group}.{key}", value, hints.get(key, Any))
    arguments = {key: value for key, value in shared.items() if key in parameters} | own
    for name, parameter in parameters.items():
        if parameter.default is inspect.Parameter.empty and name not in arguments:
            raise ConfigError(f"{group}.{name}", f"is missing; {target.__name__} needs it")
    with _named_arguments(group, own):
        return target(**arguments)


@contextlib.contextmanager
def _named_arguments(group: str, own: Spec) -> Iterator[None]:
    """Turn a ValueError into a ConfigError that names the setting of `argument=`, its beginning."""
    try:
        yield
    except ValueError as error:
        opening = re.match(r"(\w+)=", str(error))
        name = opening.group(1) if opening else ""
        field = f"{group}.{name}" if name in own else SETTING_OF.get(name, group)
        raise ConfigError(field, str(error)) from error
