"""The arguments of the commands besides training: their help, and mistakes in one of them."""

import re
from importlib import import_module
from pathlib import Path

import pytest
from interrupted import content

from gptattn.cli.arguments import parse
from gptattn.cli.commands import compare
from gptattn.errors import ConfigError


@pytest.mark.parametrize(
    "name", ["generate", "convert", "attention_map", "evaluate", "prepare", "recipes", "new"]
)
def test_the_help_of_a_command_fits_80_columns(name, call):
    code, out, err = call(name, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"{name} ")
    assert [line for line in out.splitlines() if len(line) > 80] == []
    assert call(name)[0] == 2


def test_compare_takes_folders_without_a_name_and_options_with_one():
    given = ["outputs/a", "./b=c", "d", "baseline=gqa 1", "by=attn,optim", "files=false"]
    expected = [Path("outputs/a"), Path("b=c"), Path("d")]
    parsed = parse(compare.Arguments, given)
    assert parsed == compare.Arguments(expected, "gqa 1", ("attn", "optim"), files=False)
    assert parse(compare.Arguments, ["markdown=True"]).folder == [Path("outputs")]


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
        ("compare", ["a", "--markdown"], "--markdown: is not a setting; did you mean markdown?"),
        ("compare", ["a", "markdown=yes"], "markdown: 'yes' is a str; give true or false"),
        ("compare", ["a=b"], "a=b: is not a setting; one of baseline"),
    ],
)
def test_a_mistake_names_its_argument(name, arguments, said):
    kind = import_module(f"gptattn.cli.commands.{name}").Arguments
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}"):
        parse(kind, arguments)


@pytest.mark.parametrize(
    ("name", "arguments", "code", "said"),
    [
        ("generate", ["prompt=" + "Line " * 9, "full=stop"], 3, "prompt: has 45 tokens"),
        ("generate", ["prompt=L", "samples=1000000000000"], 8, "memory: "),
        ("generate", ["prompt=L", "prompts_file=none.txt"], 2, "prompts_file: is given together"),
        ("convert", ["to=gqaa"], 2, "to: 'gqaa' is unknown; did you mean gqa"),
        ("convert", ["to=gqa", "to.num_kv_heads=3"], 2, "attn.num_kv_heads: num_kv_heads=3 must"),
        ("convert", ["to=single_head"], 2, "to: layer 0: query heads of shape"),
        ("convert", ["to=gqa", "to._target_=os.system"], 2, "to._target_: os.system is outside of"),
        ("convert", ["to=gqa", "to.num_kv_heads=[1"], 2, "to.num_kv_heads: cannot be read; write"),
        ("convert", ["to=hf", "to.num_kv_heads=1"], 2, "to.num_kv_heads: is not a setting: hf has"),
        ("attention_map", ["prompt=a", "layer=2"], 2, "layer: 2 does not exist; give 0 to 1"),
        ("evaluate", ["lengths=[0]"], 2, "lengths: 0 is not a positive number"),
        ("evaluate", ["lengths=[1000]"], 2, "lengths: 1000 is longer than the held-out text"),
        ("compare", ["board=b", "markdown=true"], 2, "board: writes files, and markdown=true none"),
        ("compare", ["ship=true", "files=false"], 2, "ship: writes files, and files=false none"),
        ("recipes", ["cache_bytes=much"], 2, "cache_bytes: 'much' is not a size; give 1000000, "),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(
    name, arguments, code, said, runs, tmp_path, call
):
    run, out = runs("mha"), tmp_path / "out"
    given = {
        "convert": [f"from={run}", f"out={out}"],
        "attention_map": [f"run={run}", f"out={out}"],
        "compare": [str(run)],
        "recipes": [],
    }
    before = content(run)
    found, printed, err = call(name, *given.get(name, [f"run={run}"]), *arguments)
    (line,) = err.splitlines()
    assert (found, printed) == (code, "")
    assert line.startswith(f"error: {said}")
    assert content(run) == before
    assert not out.exists()
