"""`name=value` arguments of the commands, their help, and one line for a mistake.

A command's arguments are a dataclass of `option`s. A field `from_` is the argument `from`. Values
are not unquoted or unescaped, since a prompt may hold any character.
"""

import contextlib
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import field, fields
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from gptattn.errors import ConfigError
from gptattn.machine.ending import run_command
from gptattn.settings.values import check_type, check_values, suggest, within

T = TypeVar("T")
SEED = {"least": 0, "most": 2**63 - 1}
PACKAGES = "packages besides gptattn whose classes a run may name"
PLACEHOLDERS = {str: "TEXT", int: "N", float: "P", Path: "PATH"}  # of arguments without a default


def option(words: str, default: Any = None, **limits: Any) -> Any:
    """Return a field with its help: `tokens: int = option("how many", 200, least=1)`.

    Without a default it is required, unless its type allows None. `limits`: those of a `Range`.
    """
    checks = within(**limits) if limits else {}
    return field(default=default, metadata={"words": words, **checks})


def run_script(run: Callable[[Sequence[str]], None], kind: type, about: str | None) -> int:
    """Run with the command line's arguments; return the exit code. Without any, print the help.

    The help has an example (the docstring of `kind`), the first paragraph of `about`, the arguments
    (the fields of `kind`), then the other paragraphs.
    """
    program, *arguments = sys.argv
    if arguments and arguments[0] not in ("-h", "--help"):
        return run_command(lambda: run(arguments), os.environ.get("HYDRA_FULL_ERROR") == "1")
    called = f"python {program}" if program.endswith(".py") else Path(program).name
    hints, words = get_type_hints(kind), dict[str, str]()
    for one in fields(kind):
        shown = one.default
        if isinstance(shown, tuple):
            shown = ",".join(shown) or "a,b"
        elif shown is None:
            shown = PLACEHOLDERS[(*get_args(hints[one.name]), hints[one.name])[0]]
        words[f"{one.name.rstrip('_')}={shown}"] = one.metadata["words"]
    width = max(map(len, words))
    row = textwrap.TextWrapper(80, break_on_hyphens=False, subsequent_indent=" " * (width + 4))
    rows = [row.fill(f"  {shown:<{width}}  {text}") for shown, text in words.items()]
    first, *others = [textwrap.fill(part, 80) for part in (about or "").split("\n\n")]
    text = "\n\n".join([f"{called} {kind.__doc__}", first, "\n".join(rows), *others])
    return run_command(lambda: print(text)) or (0 if arguments else 2)


def parse(kind: type[T], arguments: Sequence[str]) -> T:
    """Parse arguments into the dataclass `kind`. Raises ConfigError, which names the argument.

    A field that is a list may be given several times.
    """
    hints = {name.rstrip("_"): (name, hint) for name, hint in get_type_hints(kind).items()}
    values: dict[str, Any] = {}
    for argument in arguments:
        name, equals, text = argument.partition("=")
        if name not in hints or not equals:
            raise ConfigError(argument, f"is not a setting; {suggest(name, hints)}, as name=value")
        key, hint = hints[name]
        value = convert_value(hint, text, name)
        values[key] = [*values.get(key, []), value] if get_origin(hint) is list else value
    parsed = kind(**values)
    for name, (key, hint) in hints.items():
        if getattr(parsed, key) is None and type(None) not in get_args(hint):
            raise ConfigError(name, f"is missing; give {name}=...")
    check_values(parsed)
    return parsed


def convert_value(hint: Any, text: str, path: str) -> Any:
    """Return a command line's text as a value of the type `hint`; a tuple is `a,b` or `[a,b]`.

    Raises ConfigError, which names `path`.
    """
    kinds = get_args(hint) or (hint,)
    if get_origin(hint) is tuple:
        words = text.removeprefix("[").removesuffix("]").split(",")
        return tuple(convert_value(kinds[0], word.strip(), path) for word in words if word.strip())
    if type(None) in kinds and text == "null":
        return None
    if bool in kinds and text in ("true", "false"):
        return text == "true"
    for kind in kinds:
        if kind in (int, float, Path):
            with contextlib.suppress(ValueError):
                return kind(text)
    check_type(path, text, hint)
    return text
