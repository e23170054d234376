"""Parses the commands' `name=value` arguments into a dataclass. Values are not unquoted or
unescaped, since a prompt may hold any character.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from gptattn.errors import ConfigError
from gptattn.settings.values import check_type, check_values, suggest, within

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
        values[field.name] = converted(hints[field.name], text, name)
    for name, field in known.items():
        missing = field.default is MISSING and field.default_factory is MISSING
        if missing and field.name not in values:
            raise ConfigError(name, f"is missing; give {name}=...")
    parsed = kind(**values)
    check_values(parsed)
    return parsed


def converted(hint: Any, text: str, path: str) -> Any:
    """Return a command line's text as a value of the type `hint`. Raises ConfigError."""
    kinds = get_args(hint) or (hint,)
    if type(None) in kinds and text == "null":
        return None
    for kind in kinds:
        if kind in (int, float, Path, Names):
            with contextlib.suppress(ValueError):
                return kind(text)
    check_type(path, text, hint)
    return text
