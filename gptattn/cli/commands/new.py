"""Writes a small variant that trains as it is, with its settings and test, for you to change."""

import keyword
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from string import Template

from gptattn.cli.arguments import option, parse, run_script
from gptattn.errors import ConfigError
from gptattn.settings.config import CONF

TEMPLATES = files("gptattn.cli") / "new_variant"


@dataclass(frozen=True)
class Arguments:
    """mine"""

    name: str = option("names the module and attn=NAME; you can leave out `name=`", positional=True)


def run(arguments: Sequence[str]) -> None:
    """Write the variant, and print what to type next. Raises ConfigError, naming `name`."""
    name = parse(Arguments, arguments).name
    print(f"wrote {', '.join(map(str, write_variant(name)))}\nnext:")
    steps = {
        f"gptattn-train attn={name}": "train it",
        f"gptattn-check attn={name}": "is it causal, with correct gradients?",
        f"pytest test_{name}.py": "run its own test (pip install pytest)",
        f"gptattn-train -m attn=mha,{name} seed=1,2,3": "compare it",
    }
    width = max(map(len, steps))
    for step, what in steps.items():
        print(f"  {step:<{width}}  # {what}")


def write_variant(name: str) -> list[Path]:
    """Write the three files into the working directory; return their paths.

    Raises ConfigError, naming `name`, before writing any if a new variant cannot have this name.
    """
    title = "".join(word[:1].upper() + word[1:] for word in name.split("_"))
    paths = {"module": f"{name}.py", "settings": f"attn/{name}.yaml", "test": f"test_{name}.py"}
    existing = [file for file in paths.values() if Path(file).exists()]
    wrong = None
    if not re.fullmatch(r"[A-Za-z]\w*", name, re.ASCII) or {name, title} & {*keyword.kwlist}:
        wrong = "cannot name a Python module; use letters, digits and _, as in my_attention"
    elif (CONF / "attn" / f"{name}.yaml").exists():
        wrong = f"is already taken by attn={name}; use another"
    elif existing:
        wrong = f"would overwrite {', '.join(existing)}; use another, or move them"
    elif find_spec(name) is not None:
        wrong = "is the name of an installed Python module; use another"
    if wrong is not None:
        raise ConfigError("name", f"{name!r} {wrong}")
    Path("attn").mkdir(exist_ok=True)
    for template, file in paths.items():
        text = (TEMPLATES / f"{template}.txt").read_text(encoding="utf-8")
        Path(file).write_text(Template(text).substitute(name=name, title=title), encoding="utf-8")
    return [*map(Path, paths.values())]


main = partial(run_script, run, Arguments)
