"""Check values against a dataclass that declares each setting's type and, as metadata, its range.
Command lines, records, YAML files and scripts all use these checks.
"""

import difflib
import math
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from gptattn.errors import ConfigError

T = TypeVar("T")

RANGE = "range"  # the metadata key of a field's Range
LARGEST_INT = 2**53  # a float represents every integer up to here
TRUTHS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


@dataclass(frozen=True)
class Range:
    """The numbers that a setting accepts; never infinity or NaN.

    `above` and `below` are exclusive bounds, `least` and `most` inclusive ones.
    """

    above: float = -math.inf
    least: float = -math.inf
    below: float = math.inf
    most: float = math.inf
    hint: str = ""  # appended to the error message: what else would be right

    def check(self, field: str, value: float) -> None:
        """Raise ConfigError, saying what would be right, for a number outside the range."""
        whole = isinstance(value, int) and self.most == math.inf
        most = LARGEST_INT if whole else self.most
        if math.isfinite(value) and value > most:
            raise ConfigError(field, f"{value} is too large; at most {most}")
        if self.above < value < self.below and self.least <= value <= most:
            return
        start = (
            f"{self.least:g} or more" if self.above == -math.inf else f"one above {self.above:g}"
        )
        end = "" if self.below == math.inf else f", below {self.below:g}"
        raise ConfigError(field, f"{value} {self._complaint(value)}; give {start}{end}{self.hint}")

    def _complaint(self, value: float) -> str:
        if self.below < math.inf:
            return "is out of range"
        if self.above == 0:
            return "is not a positive number"
        if not math.isfinite(value):
            return "is not finite"
        return "is negative" if self.least == 0 else "is too small"


def within(
    *,
    above: float = -math.inf,
    least: float = -math.inf,
    below: float = math.inf,
    most: float = math.inf,
    hint: str = "",
) -> dict[str, Range]:
    """Return the metadata of a field with this range: `field(metadata=within(least=0))`."""
    return {RANGE: Range(above, least, below, most, hint)}


def check_ranges(settings: Any, path: str = "") -> None:
    """Raise ConfigError, naming the field, for the first number outside its range."""
    for field in fields(settings):
        name, value = f"{path}{field.name}", getattr(settings, field.name)
        if is_dataclass(value):
            check_ranges(value, f"{name}.")
        elif isinstance(value, int | float) and RANGE in field.metadata:
            field.metadata[RANGE].check(name, value)


def typed(kind: type[T], node: Any, path: str = "") -> T:
    """Build the dataclass `kind` from a tree of plain values, converting each to its type.

    A field's default is what runs did before there was such a setting: their records lack it.
    Raises ConfigError, naming the field, for an unknown or missing name and for a wrong type.
    """
    hints = get_type_hints(kind)
    assert is_dataclass(kind)
    later = {
        field.name
        for field in fields(kind)
        if (field.default, field.default_factory) != (MISSING, MISSING)
    }
    if not isinstance(node, dict):
        names = ", ".join(hints)
        raise ConfigError(path or "settings", f"{node!r} is not a table; give one with {names}")
    dot = f"{path}." if path else ""
    for name in node:
        if name not in hints:
            raise ConfigError(f"{dot}{name}", f"is not a setting; {suggest(str(name), hints)}")
    values = {}
    for name, hint in hints.items():
        if name not in node and name in later:
            continue
        if name not in node:
            raise ConfigError(f"{dot}{name}", "is missing; this version needs a value")
        make: Callable[..., Any] = typed if is_dataclass(hint) else converted
        values[name] = make(hint, node[name], f"{dot}{name}")
    return kind(**values)


def converted(hint: Any, value: Any, path: str) -> Any:
    """Return the value converted to the type `hint`.

    Strings can become numbers or bools; ints can become floats, 0 and 1 bools; numbers and bools
    can become strings. Raises ConfigError, naming the field, for any other value of a wrong type.
    """
    kinds = [get_origin(kind) or kind for kind in _alternatives(hint)]
    if isinstance(value, str) and value in _words(hint):
        return value
    if type(value) in kinds or value is None or hint is Any:
        value = _items_converted(hint, value, path)
    elif isinstance(value, str) and {int, float, bool} & {*kinds}:
        value = _parsed(hint, value, path)
    elif type(value) is int and float in kinds:
        value = _as_float(value, path)
    elif type(value) is int and bool in kinds and value in (0, 1):
        value = bool(value)
    elif type(value) in (int, float, bool) and str in kinds:
        value = str(value)
    check_type(path, value, hint)
    return value


def _items_converted(hint: Any, value: Any, path: str) -> Any:
    """Convert the items of a list or dict whose `hint` declares their type."""
    for kind in _alternatives(hint):
        *_, inner = (None, *get_args(kind))
        if inner is not None and get_origin(kind) is list and isinstance(value, list):
            return [converted(inner, one, path) for one in value]
        if inner is not None and get_origin(kind) is dict and isinstance(value, dict):
            return {key: converted(inner, one, f"{path}.{key}") for key, one in value.items()}
    return value


def _parsed(hint: Any, text: str, path: str) -> Any:
    kinds = _alternatives(hint)
    for kind in (int, float):
        if kind in kinds and text.isascii():
            with suppress(ValueError):
                return kind(text)
    if bool in kinds and text.lower() in TRUTHS:
        return TRUTHS[text.lower()]
    if bool in kinds:
        raise ConfigError(path, f"{text!r} is neither true nor false")
    names = _type_names(hint)
    what = names if _words(hint) else _with_article(names)
    raise ConfigError(path, f"{text!r} is not {what}; give one")


def _as_float(value: int, path: str) -> float:
    try:
        return float(value)
    except OverflowError:
        largest = sys.float_info.max
        raise ConfigError(path, f"is too large for a float; at most {largest:.1e}") from None


def check_type(field: str, value: Any, hint: Any) -> None:
    """Raise ConfigError if `value` is not of the type `hint`; nothing is converted."""
    if hint is Any:
        return
    allowed = _alternatives(hint)
    words = _words(hint)
    if words and not any(isinstance(value, kind) for kind in allowed if isinstance(kind, type)):
        check_choice(field, str(value), words)
        return
    if type(value) is int and abs(value) >= 2**63:
        raise ConfigError(field, "is too large; at most 2**63 - 1")
    # isinstance would accept True as an int. An int is accepted where a float is declared.
    kinds = [get_origin(kind) or kind for kind in allowed]
    if type(value) in kinds or (type(value) is int and float in kinds):
        return
    if value is None:
        raise ConfigError(field, f"is null; give {_type_names(hint)}")
    found = _with_article(type(value).__name__)
    raise ConfigError(field, f"{value!r} is {found}; give {_type_names(hint)}")


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _words(hint: Any) -> list[str]:
    """Return the words that a Literal in the type allows."""
    literals = [kind for kind in _alternatives(hint) if get_origin(kind) is Literal]
    return [str(word) for literal in literals for word in get_args(literal)]


def _type_names(hint: Any) -> str:
    # "float" would not say that whole numbers are right too; it includes int.
    kinds = [get_origin(kind) or kind for kind in _alternatives(hint)]
    names = {type(None): "null", float: "a number"}
    told = [k for k in kinds if k is not Literal and (k is not int or float not in kinds)]
    return " or ".join([*_words(hint), *(names.get(kind, kind.__name__) for kind in told)])


def _with_article(name: str) -> str:
    if name.startswith("a "):
        return name
    return f"an {name}" if name.startswith("int") else f"a {name}"


def dotted(node: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted name of every setting and group in a nested dict."""
    for key, value in node.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from dotted(value, f"{prefix}{key}.")


def check_choice(field: str, value: str, choices: Iterable[str]) -> None:
    """Raise ConfigError, suggesting the nearest choice, if `value` is not one of `choices`."""
    choices = list(choices)
    if value not in choices:
        raise ConfigError(field, f"{value!r} is unknown; {suggest(value, choices)}")


def suggest(value: str, choices: Iterable[str]) -> str:
    """Return `did you mean X? one of ...`, or only the list if no choice is near."""
    choices = sorted(choices)
    near = difflib.get_close_matches(value, choices, n=1, cutoff=0.5)
    listed = f"one of {', '.join(choices)}"
    return f"did you mean {near[0]}? {listed}" if near else listed
