"""What values a setting takes: ranges and choices beside its field, and the types that a
constructor declares. Settings, command lines and scripts use these checks.
"""

import difflib
import math
import types
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from gptattn.errors import ConfigError

T = TypeVar("T")

RANGE, CHOICES = "range", "choices"  # keys of a field's metadata
AUTO = {CHOICES: ("auto",)}
LARGEST_INT = 2**53  # a float represents every integer up to here


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
) -> dict[str, Any]:
    """Return the metadata of a field with this range: `field(metadata=within(least=0))`."""
    return {RANGE: Range(above, least, below, most, hint)}


def one_of(words: Any) -> dict[str, Any]:
    """Return the metadata of a str field that takes one of the words of this Literal."""
    return {CHOICES: get_args(words)}


def check_values(settings: Any, path: str = "") -> None:
    """Raise ConfigError, naming the field, for the first value outside its range or choices."""
    for field in fields(settings):
        name, value = f"{path}{field.name}", getattr(settings, field.name)
        if is_dataclass(value):
            check_values(value, f"{name}.")
        elif isinstance(value, int | float) and RANGE in field.metadata:
            field.metadata[RANGE].check(name, value)
        elif isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(name, f"{value} is not finite; give a number")
        elif isinstance(value, str) and CHOICES in field.metadata:
            if RANGE in field.metadata and value not in field.metadata[CHOICES]:
                words = " or ".join(field.metadata[CHOICES])
                raise ConfigError(name, f"{value!r} is not a number; give one, or {words}")
            check_choice(name, value, field.metadata[CHOICES])


def typed(kind: type[T], node: Any) -> T:
    """Build the dataclass `kind` from a tree of plain values, such as a run's config.yaml.

    A field's default is what runs did before there was such a setting: their records lack it.
    Raises ConfigError, naming the field, for an unknown or missing name and for a wrong type.
    """
    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), node))  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        raise from_omegaconf(error) from error


def from_omegaconf(error: OmegaConfBaseException) -> ConfigError:
    """Return the ConfigError for OmegaConf's error about a setting."""
    field = str(error.full_key or error.key or "config")
    if isinstance(error, MissingMandatoryValue):
        return ConfigError(field, "is missing; give a value")
    message = (error.msg or str(error)).splitlines()[0]
    if "is not Optional" in message:
        return ConfigError(field, "is null; give a value")
    if "is not a ListConfig" in message:
        return ConfigError(field, f"is not a list; write {field}=[a,b]")
    return ConfigError(field, message)


def converted(hint: Any, text: str, path: str) -> Any:
    """Return a command line's text as a value of the type `hint`. Raises ConfigError."""
    kinds = _alternatives(hint)
    if text in _words(hint):
        return text
    for kind in (int, float):
        if kind in kinds and text.isascii():
            with suppress(ValueError):
                return kind(text)
    if {int, float} & {*kinds}:
        raise ConfigError(path, f"{text!r} is not {_type_names(hint)}; give one")
    check_type(path, text, hint)
    return text


def check_type(field: str, value: Any, hint: Any) -> None:
    """Raise ConfigError if `value` is not of the type `hint`, as a constructor declares it."""
    if hint is Any:
        return
    allowed, words = _alternatives(hint), _words(hint)
    if words and not any(isinstance(value, kind) for kind in allowed if isinstance(kind, type)):
        check_choice(field, str(value), words)
        return
    # isinstance would accept True as an int. An int is accepted where a float is declared.
    kinds = [get_origin(kind) or kind for kind in allowed]
    if type(value) in kinds or (type(value) is int and float in kinds):
        return
    if value is None:
        raise ConfigError(field, f"is null; give {_type_names(hint)}")
    raise ConfigError(field, f"{value!r} is a {type(value).__name__}; give {_type_names(hint)}")


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _words(hint: Any) -> list[str]:
    """Return the words that a Literal in the type allows."""
    literals = [kind for kind in _alternatives(hint) if get_origin(kind) is Literal]
    return [str(word) for literal in literals for word in get_args(literal)]


def _type_names(hint: Any) -> str:
    names: dict[Any, str] = {
        type(None): "null",
        float: "a number",
        int: "a whole number",
        bool: "true or false",
    }
    kinds = [get_origin(kind) or kind for kind in _alternatives(hint)]
    told = [kind for kind in kinds if kind is not Literal and (kind, float in kinds) != (int, True)]
    known = (names.get(kind, str(getattr(kind, "__name__", kind))) for kind in told)
    return " or ".join([*_words(hint), *map(str, known)])


def dotted(node: Any, prefix: str = "") -> Iterator[str]:
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
    if not choices:
        return "there is none"
    near = difflib.get_close_matches(value, choices, n=1, cutoff=0.5)
    listed = f"one of {', '.join(choices)}"
    return f"did you mean {near[0]}? {listed}" if near else listed
