"""Parses the commands' `name=value` arguments, and prints their help.

A command's arguments are a dataclass of `option`s. A field `from_` is the argument `from`; a
`positional` field also takes arguments without a name. Values are not unquoted or unescaped, since
a prompt can contain any character.
"""

import ast
import contextlib
import inspect
import os
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import field, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from msgspec import Meta, ValidationError, convert

from gptattn.errors import ConfigError
from gptattn.machine.disk import expand_path
from gptattn.machine.ending import run_command
from gptattn.settings.values import build_dataclass, check_type, suggest

T = TypeVar("T")
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Count = Annotated[int, Meta(ge=1)]
PACKAGES = "packages other than gptattn that a run can take classes from"
PLACEHOLDERS = {str: "TEXT", int: "N", float: "P", Path: "PATH"}  # for arguments without default


def option(words: str, default: Any = None, positional: bool = False) -> Any:
    """Return a field with its help: `tokens: Count = option("how many", 200)`.

    Without a default, it is required unless its type allows None.
    """
    return field(default=default, metadata={"words": words, "positional": positional})


def run_script(
    run: Callable[[Sequence[str]], None],
    kind: type,
    argv: Sequence[str] | None = None,
) -> int:
    """Run with the command line's arguments; return the exit code.

    With --help, or without arguments if one is required, print the help: an example (the docstring
    of `kind`), the first paragraph of its module's docstring, the arguments (its fields), then the
    other paragraphs. `argv` replaces `sys.argv`.
    """
    program, *arguments = argv or sys.argv
    wants_help = bool({"-h", "--help"} & {*arguments})
    if not wants_help and (arguments or not _list_missing(kind())):
        return run_command(lambda: run(arguments), os.environ.get("HYDRA_FULL_ERROR") == "1")
    called = f"python {program}" if ".py" in program else Path(program).name
    hints, words = get_type_hints(kind), dict[str, str]()
    for one in fields(kind):
        shown = one.default
        if isinstance(shown, tuple):
            shown = ",".join(map(str, shown)) or "a,b"
        elif isinstance(shown, bool):
            shown = str(shown).lower()
        elif shown is None:
            shown = PLACEHOLDERS[(*get_args(hints[one.name]), hints[one.name])[0]]
        words[f"{one.name.rstrip('_')}={shown}"] = one.metadata["words"]
    width = max(map(len, words))
    row = textwrap.TextWrapper(80, break_on_hyphens=False, subsequent_indent=" " * (width + 4))
    rows = [row.fill(f"  {shown:<{width}}  {text}") for shown, text in words.items()]
    module = ast.parse(inspect.getsource(sys.modules[kind.__module__]))  # -OO drops docstrings
    (itself,) = (n for n in module.body if isinstance(n, ast.ClassDef) and n.name == kind.__name__)
    example, about = (ast.get_docstring(one) or "" for one in (itself, module))
    first, *others = [textwrap.fill(part, 80) for part in about.split("\n\n")]
    text = "\n\n".join([f"{called} {example}", first, "\n".join(rows), *others])
    return run_command(lambda: print(text)) or (0 if wants_help else 2)


def parse(kind: type[T], arguments: Sequence[str]) -> T:
    """Parse arguments into the dataclass `kind`. Raises ConfigError, which names the argument.

    Type a tuple as a,b or [a,b], or repeat the argument.
    """
    hints = {name.rstrip("_"): (name, hint) for name, hint in get_type_hints(kind).items()}
    places = [one.name for one in fields(kind) if one.metadata["positional"]]  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for argument in arguments:
        name, equals, text = argument.partition("=")
        if places and not re.match(r"-|\w+=", argument):  # ./a=b is a path
            name, equals, text = places[0], "=", argument
        if name not in hints or not equals:
            unknown = f"is not an argument; write name=value; {suggest(name.lstrip('-'), hints)}"
            raise ConfigError(name, f"has no value; give {name}=..." if name in hints else unknown)
        key, hint = hints[name]
        if get_origin(hint) is tuple:
            of = get_args(hint)[0]
            listed = of is not Path or text.startswith("[")  # a path can contain commas
            words = text.removeprefix("[").removesuffix("]").split(",") if listed else [text]
            items = [_convert(of, word.strip(), name) for word in words if word.strip()]
            values[key] = (*values.get(key, ()), *items)
        else:
            values[key] = _convert(hint, text, name)
    parsed = build_dataclass(kind, values)
    for name in _list_missing(parsed):
        raise ConfigError(name, f"is missing; give {name}=...")
    return parsed


def parse_own(kind: type[T], arguments: Sequence[str]) -> tuple[T, list[str]]:
    """Parse the arguments that `kind` has; return it and the others, which are a run's settings.

    Raises ConfigError, which names the argument.
    """
    names = {name.rstrip("_") for name in get_type_hints(kind)}
    own = [one for one in arguments if one.partition("=")[0] in names or "=" not in one]
    return parse(kind, own), [one for one in arguments if one not in own]


def _list_missing(parsed: Any) -> list[str]:
    """Return the names of the required arguments that were not given."""
    hints = get_type_hints(type(parsed))
    none = [name for name in hints if getattr(parsed, name) is None]
    return [name.rstrip("_") for name in none if type(None) not in get_args(hints[name])]


def _convert(hint: Any, text: str, name: str) -> Any:
    """Convert text from the command line to the type `hint`. Raises ConfigError."""
    if text == "null" and type(None) in get_args(hint):
        return None
    with contextlib.suppress(ValidationError):
        return convert(text, hint, strict=False, dec_hook=lambda _, one: expand_path(one, name))
    return check_type(name, text, hint)
