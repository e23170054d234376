"""Parses the commands' `name=value` arguments into a dataclass. Values are not unquoted or
unescaped, since a prompt may hold any character.
"""

import types
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from gptattn.errors import ConfigError
from gptattn.settings.values import check_values, converted, suggest, within

T = TypeVar("T")


class Names(tuple[str, ...]):
    """A tuple of names, parsed from `a,b` or `[a,b]`."""

    __slots__ = ()

    def __new__(cls, text: str = "") -> "Names":
        names = text.removeprefix("[").removesuffix("]").split(",")
        return super().__new__(cls, (name.strip() for name in names if name.strip()))


NO_NAMES = Names()
SEED = within(least=0, most=2**63 - 1)


def parse(kind: type[T], arguments: Sequence[str]) -> T:
    """Parse arguments into the dataclass `kind`. Raises ConfigError, which names the argument.

    A field's metadata may give another argument name, as {"name": "from"}: `from` is a keyword of
    Python and cannot name a field.
    """
    hints = get_type_hints(kind)
    known = {field.metadata.get("name", field.name): field for field in fields(kind)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for argument in arguments:
        name, equals, text = argument.partition("=")
        if name not in known or not equals:
            raise ConfigError(argument, f"is not a setting; {suggest(name, known)}, as name=value")
        field = known[name]
        values[field.name] = _value(name, text, hints[field.name])
    for name, field in known.items():
        missing = field.default is MISSING and field.default_factory is MISSING
        if missing and field.name not in values:
            raise ConfigError(name, f"is missing; give {name}=...")
    parsed = kind(**values)
    check_values(parsed)
    return parsed


def _value(name: str, text: str, hint: Any) -> Any:
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if type(None) in kinds and text == "null":
        return None
    (kind,) = (k for k in kinds if k is not type(None))
    return kind(text) if kind in (Path, Names) else converted(kind, text, name)
