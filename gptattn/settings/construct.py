"""Calls what a spec names: `_target_` is a class or function, the other keys are its arguments."""

import contextlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_type_hints

from gptattn.errors import ConfigError
from gptattn.settings.config import Spec
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
    "fraction": "position.fraction",
}


def find_target(group: str, spec: Spec, allow_targets: Sequence[str]) -> Callable[..., Any]:
    """Import the class or function that `spec` names, from the group's package or an allowed one.

    Raises ConfigError if it does not exist, is abstract, or lies in another package.
    """
    packages = [HOMES.get(group) or HOMES.get(group.partition(".")[0], "gptattn"), *allow_targets]
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
    with named_arguments(group, own):
        return target(**arguments)


@contextlib.contextmanager
def named_arguments(group: str, own: Spec) -> Iterator[None]:
    """Turn a ValueError into a ConfigError that names the setting of `argument=`, its beginning."""
    try:
        yield
    except ValueError as error:
        opening = re.match(r"(\w+)=", str(error))
        name = opening.group(1) if opening else ""
        field = f"{group}.{name}" if name in own else SETTING_OF.get(name, group)
        # No setting has this name.
        message = re.sub(r"^head_dim=\S+", r"\g<0> (model.d_model / num_heads)", str(error))
        raise ConfigError(field, message) from error
