"""The arguments of the commands besides training: their help, and mistakes in one of them."""

import re
from importlib import import_module

import pytest

from gptattn.cli.arguments import parse
from gptattn.errors import ConfigError


@pytest.mark.parametrize(
    "name", ["generate", "convert", "attention_map", "evaluate", "prepare", "recipes"]
)
def test_the_help_of_a_script_fits_80_columns(name, call):
    code, out, err = call(name, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"{name} ")
    assert [line for line in out.splitlines() if len(line) > 80] == []
    assert call(name)[0] == 2


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("generate", ["run=a", "tokens=many"], "tokens: 'many' is a str; give a whole number"),
        ("generate", ["run=a", "tokens=0"], "tokens: 0 is out of range; give 1 or more"),
        ("generate", ["run=a", "dtype=half"], "dtype: 'half' is unknown; one of bfloat16"),
        ("generate", ["promt=L"], "promt=L: is not a setting; did you mean prompt?"),
        ("generate", ["prompt=L"], "run: is missing; give run="),
        ("convert", ["from=a", "to=gqa", "seed=-1"], "seed: -1 is out of range; give 0 or more"),
        ("evaluate", ["run=a", "lengths=[4,long]"], "lengths: 'long' is a str; give"),
    ],
)
def test_a_mistake_names_its_argument(name, arguments, said):
    kind = import_module(f"gptattn.cli.commands.{name}").Arguments
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}"):
        parse(kind, arguments)
