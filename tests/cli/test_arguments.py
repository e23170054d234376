"""The arguments of the commands besides training: their help, and mistakes in one of them."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from interrupted import content
from support import is_complaint, refuses

from gptattn.cli.arguments import parse
from gptattn.cli.commands import compare


@pytest.mark.parametrize(
    "name", ["generate", "convert", "attention_map", "evaluate", "prepare", "new"]
)
def test_the_help_of_a_command_fits_80_columns(name, call):
    code, out, err = call(name, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"{name} ")
    assert [line for line in out.splitlines() if len(line) > 80] == []
    assert call(name)[0] == 2


def test_compare_takes_folders_without_a_name_and_options_with_one():
    given = ["outputs/a", "./b=c", "d,e", "baseline=gqa 1", "by=attn,optim", "files=false"]
    expected = (Path("outputs/a"), Path("b=c"), Path("d,e"))
    parsed = parse(compare.Arguments, given)
    assert parsed == compare.Arguments(expected, "gqa 1", ("attn", "optim"), files=False)
    assert parse(compare.Arguments, ["markdown=True"]).folder == (Path("outputs"),)


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("generate", ["run=a", "tokens=many"], "tokens: 'many'"),
        ("generate", ["promt=L"], "promt: prompt"),
        ("generate", ["prompt=L"], "run: run="),
        ("convert", ["from=a", "to=gqa", "seed=-1"], "seed: >= 0"),
        ("evaluate", ["run=a", "lengths=[4,long]"], "lengths: 'long'"),
        ("compare", ["a", "--markdown"], "--markdown: markdown"),
        ("compare", ["a=b"], "a: baseline"),
    ],
)
def test_a_mistake_names_its_argument(name, arguments, said):
    kind = import_module(f"gptattn.cli.commands.{name}").Arguments
    with refuses(said):
        parse(kind, arguments)


@pytest.mark.parametrize(
    ("name", "arguments", "code", "said"),
    [
        ("generate", ["prompt=L", "samples=1000000000000"], 8, "memory: "),
        ("convert", ["to=gqaa"], 2, "to: gqa"),
        ("convert", ["to=gqa", "to.num_kv_heads=3"], 2, "attn.num_kv_heads: divide"),
        ("convert", ["to=single_head"], 2, "to: heads of shape"),
        ("convert", ["to=gqa", "to._target_=os.system"], 2, "to._target_: os.system"),
        ("convert", ["to=hf", "to.num_kv_heads=1"], 2, "to.num_kv_heads: "),
        ("attention_map", ["prompt=" + "Line " * 9], 3, "prompt: 45 tokens"),
        ("evaluate", ["lengths=[0]"], 2, "lengths: >= 1"),
        ("evaluate", ["lengths=[1000]"], 2, "lengths: held-out"),
        ("compare", ["ship=true"], 2, "ship: track or the battery"),
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
    }
    before = content(run)
    found, printed, err = call(name, *given.get(name, [f"run={run}"]), *arguments)
    assert (found, printed) == (code, "")
    assert is_complaint(err, said)
    assert content(run) == before
    assert not out.exists()


def test_help_is_the_same_where_python_drops_docstrings():
    code = "from gptattn.cli.commands import new; new.main(argv=['gptattn-new', '--help'])"
    shown = [
        subprocess.run([sys.executable, *flags, "-c", code], check=True, capture_output=True).stdout
        for flags in ([], ["-OO"])
    ]
    assert shown[0] == shown[1] != b""
