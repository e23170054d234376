"""Calls the class or function that a spec names in `_target_`, with its other keys as arguments."""

import contextlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Unpack, get_args, get_origin, get_type_hints

from hydra.utils import instantiate

from gptattn.errors import ConfigError, ForeignError
from gptattn.machine.ending import find_own_code
from gptattn.settings.config import CONF, Spec
from gptattn.settings.own_code import find_folder
from gptattn.settings.values import check_type, suggest

# Someone else's run folder may name any class, but can import only from these packages and from
# the user's own folders.
PACKAGES = ("gptattn", "lightning.pytorch.loggers", "lightning.pytorch.callbacks")

# Argument of an attention -> the setting that fills it, if the constructor takes it.
FILLED_BY = {
    "d_in": "model.d_model",
    "d_out": "model.d_model",
    "context_length": "model.context_length",
    "num_heads": "model.num_heads",
    "num_layers": "model.num_layers",
    "dropout": "model.dropout",
    "qkv_bias": "model.qkv_bias",
    "out_bias": "block.bias",
}
# Argument -> the setting that an error about it names.
SETTING_OF = FILLED_BY | {"head_dim": "model.num_heads", "fraction": "position.fraction"}


class ForeignTarget(ConfigError):
    """A `_target_` outside the packages that the command allows."""


def check_targets(
    node: Mapping[str, Any], allow_targets: Sequence[str], path: str = ""
) -> set[Path]:
    """Return the user's folders that hold the `_target_`s in a tree of settings.

    Raises ForeignTarget for a target outside these and the allowed packages. Imports nothing.
    """
    folders = set[Path]()
    for key, value in node.items():
        field = f"{path}{key}"
        if key == "_target_" and not isinstance(value, str):
            raise ConfigError(field, "is missing; give package.module.Class")
        if key == "_target_" and not _is_in(value, PACKAGES):
            if (folder := find_folder(value)) is not None:
                folders.add(folder)
            elif not _is_in(value, allow_targets):
                top = value[:100].partition(".")[0]
                raise ForeignTarget(
                    field,
                    f"{value[:100]} is outside {', '.join([*PACKAGES, *allow_targets])} and this "
                    f"folder; if you trust it, add allow_targets=[{top}]",
                )
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, dict):
                folders |= check_targets(one, allow_targets, f"{field}.")
    return folders


def _is_in(name: str, packages: Iterable[str]) -> bool:
    return any(name.startswith(f"{package}.") for package in packages)


def find_target(group: str, spec: Spec, allow_targets: Sequence[str]) -> Callable[..., Any]:
    """Import the class or function that `spec` names, from gptattn or an allowed package.

    Raises ConfigError if it does not exist, is abstract, or lies in another package.
    """
    field, name = f"{group}._target_", spec.get("_target_")
    check_targets({"_target_": name}, allow_targets, f"{group}.")
    home, _, attribute = str(name).rpartition(".")
    try:
        module = import_module(home)
    except Exception as error:  # whatever the user's own module raises
        if (place := find_own_code(error)) is not None:
            raise ForeignError(place, f"{type(error).__name__}: {error}") from error
        raise ConfigError(
            field, f"{name} cannot be imported ({error}); give package.module.Class"
        ) from error
    if (target := getattr(module, attribute, None)) is None:
        classes = [
            name
            for name, one in vars(module).items()
            if inspect.isclass(one) and f"{one.__module__}.".startswith(f"{home}.")
        ]
        raise ConfigError(field, f"{home} has no {attribute}; {suggest(attribute, classes)}")
    if inspect.isabstract(target) or not callable(target):
        raise ConfigError(field, f"{name} is abstract or not callable; name a subclass or function")
    # `mypackage.os.system` begins with an allowed package but is `os`: check where it was defined.
    defined = f"{getattr(target, '__module__', '')}.{attribute}"
    check_targets({"_target_": defined}, allow_targets, f"{group}.")
    return target


@dataclass(frozen=True)
class Arguments:
    """The arguments that a target takes by name."""

    types: dict[str, Any]
    required: list[str]
    others: bool  # whether it takes any other name too


def arguments_of(target: Callable[..., Any]) -> Arguments:
    """Return the arguments of a class or function; `**rest: Unpack[T]` has the keys of T."""
    try:
        hints = get_type_hints(
            target.__init__ if inspect.isclass(target) else target, include_extras=True
        )
    except (NameError, TypeError):  # names that only a type checker imports
        hints = {}
    types: dict[str, Any] = {}
    required, others = [], False
    for name, parameter in inspect.signature(target).parameters.items():
        hint = hints.get(name, Any)
        if parameter.kind is parameter.VAR_KEYWORD:
            if get_origin(hint) is Unpack:
                (typed_dict,) = get_args(hint)
                types |= get_type_hints(typed_dict, include_extras=True)
                required += typed_dict.__required_keys__
            else:
                others = True
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            types[name] = hint
            if parameter.default is parameter.empty:
                required.append(name)
    return Arguments(types, required, others)


def construct(
    group: str,
    spec: Spec,
    shared: dict[str, Any],
    allow_targets: Sequence[str],
    kind: type = object,
) -> Any:
    """Call the target of `spec` with the keys of `spec`, and those of `shared` that it declares.

    Raises ConfigError, naming the field: as `bind` does, for a ValueError of the target (its
    message should begin with `argument=`), and for a result that is not a `kind`.
    """
    make = bind(group, spec, shared, allow_targets)
    with named_arguments(group, spec):
        result = make()
    if not isinstance(result, kind):
        name = f"{kind.__module__}.{kind.__qualname__}"
        raise ConfigError(f"{group}._target_", f"is not a {name}; give a subclass of it")
    return result


def bind(
    group: str, spec: Spec, shared: dict[str, Any], allow_targets: Sequence[str]
) -> Callable[[], Any]:
    """Return a call of the target with these arguments, as `construct` makes it.

    Raises ConfigError, naming the field, for an unknown key, a wrong type or a missing argument.
    """
    target = find_target(group, spec, allow_targets)
    own = {key: value for key, value in spec.items() if key != "_target_"}
    takes = arguments_of(target)
    for key, value in own.items():
        if key not in takes.types and not takes.others:
            choices = takes.types.keys() - shared
            hint = suggest(key, choices) if choices else "leave it out"
            files = sorted((CONF / group).glob("*.yaml"))
            having = [file.stem for file in files if f"\n{key}:" in file.read_text("utf-8")]
            if having:
                hint = f"use {' or '.join(f'{group}={name}' for name in having)}"
            raise ConfigError(f"{group}.{key}", f"is not an argument of {target.__name__}; {hint}")
        check_type(f"{group}.{key}", value, takes.types.get(key, Any))
    added = {key: value for key, value in shared.items() if key in takes.types and key not in own}
    for name in takes.required:
        if name not in own | added:
            raise ConfigError(f"{group}.{name}", f"is missing; {target.__name__} needs {name}=")
    # instantiate() would copy shared objects, such as a position of all layers: pass them here.
    make = instantiate({**spec, "_partial_": True}, _convert_="all", _recursive_=False)
    return partial(make, **added)


@contextlib.contextmanager
def named_arguments(group: str, own: Spec) -> Iterator[None]:
    """Turn a ValueError that begins with `argument=` into a ConfigError that names its setting."""
    try:
        yield
    except ValueError as error:
        opening = re.match(r"(\w+)=", str(error))
        name = opening.group(1) if opening else ""
        field = f"{group}.{name}" if name in own else SETTING_OF.get(name, group)
        message = str(error)
        if name == "head_dim" and name not in own:  # then it is not a setting
            message = re.sub(r"^\S+", r"\g<0> (model.d_model / num_heads)", message)
        raise ConfigError(field, message) from error
