"""Tab completion: what a shell is offered for an unfinished line."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from building import PROBE_CONFIGS, menu
from support import command

from gptattn.settings.compose import CONF

Complete = Callable[[str], list[str]]

PROBE = """
import sys
from gptattn.cli.main import main
try:
    main()
finally:
    assert not {"torch", "lightning", "scipy"} & sys.modules.keys()
"""


@pytest.fixture
def complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Complete:
    """A function that returns bash's completions of a line's last word, in a small folder."""

    def ask(line: str) -> list[str]:
        monkeypatch.setenv("COMP_LINE", line)
        monkeypatch.setenv("COMP_POINT", str(len(line)))
        assert command(tmp_path, "-sc", "query=bash") == 0
        out, err = capfd.readouterr()
        assert err == ""
        return out.split()

    return ask


def test_after_a_comma_come_the_choices_that_the_list_has_not(complete: Complete) -> None:
    others = [f"attn=mha,{name}" for name in menu("attn") if name != "mha"]
    assert complete("python train.py attn=mha,") == others
    assert complete("python train.py -m attn=mqa,mha,gq") == ["attn=mqa,mha,gqa"]
    assert complete("gptattn-train optim=adamw,muon,") == []


def test_the_first_choice_and_settings_complete_as_before(complete: Complete) -> None:
    assert complete("python train.py attn=") == [f"attn={name}" for name in menu("attn")]
    assert complete("python train.py model.d_m") == ["model.d_mlp=", "model.d_model="]
    assert complete("python train.py batch_size=") == ["batch_size=16"]


def test_names_in_brackets_complete_parts_once_and_layers_again(complete: Complete) -> None:
    menu_of_probes = f"python train.py hydra.searchpath=[file://{PROBE_CONFIGS}]"
    assert complete(f"{menu_of_probes} part=[probe_sh") == ["part=[probe_shift"]
    assert complete(f"{menu_of_probes} part=[probe_shift,probe_") == [
        "part=[probe_shift,probe_stretch"
    ]
    assert complete(f"{menu_of_probes} -m part=[],[probe_sh") == ["part=[],[probe_shift"]
    assert complete("python train.py logger=[tensorboard,c") == ["logger=[tensorboard,csv"]
    assert complete("python train.py pattern=[mqa,mq") == ["pattern=[mqa,mqa"]
    all_of_them = [f"pattern=[{name}" for name in menu("attn")]
    assert complete("python train.py pattern=[") == all_of_them


@pytest.mark.parametrize("line", ["attn=mha,gqa model=na", "attn=mha,gqa -m --debug model=na"])
def test_lists_and_flags_before_a_word_are_no_hindrance(line: str, complete: Complete) -> None:
    assert complete(f"python train.py {line}") == ["model=nano"]
    settings = complete(f"python train.py {line.removesuffix('=na')}.context")
    assert settings == ["model.context_length="]


def test_paths_complete_from_here_whatever_is_in_their_names(
    tmp_path: Path, complete: Complete
) -> None:
    run = tmp_path / "outputs" / "mha,model=nano_s1_8abfe1"
    run.mkdir(parents=True)
    (tmp_path / "book.txt").touch()
    assert complete("python train.py resume=out") == ["resume=outputs"]
    assert complete("python train.py resume=outputs/mha,m") == [f"resume=outputs/{run.name}"]
    assert complete("python train.py resume=./outputs/") == [f"resume=./outputs/{run.name}"]
    assert complete(f"python train.py init_from={run.parent}/m") == [f"init_from={run}"]
    assert complete("python train.py data=text data.path=b") == ["data.path=book.txt"]


def test_the_front_door_has_what_fish_looks_for(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path, "-sc", "install=fish") == 0
    wanted = re.search(r'grep -q "(.+?)"', capfd.readouterr().out)
    assert wanted is not None
    assert wanted.group(1) in (CONF.parent / "train.py").read_text(encoding="utf-8")


def test_completion_waits_for_no_large_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMP_LINE", "gptattn-train attn=mha,gq")
    asked = [sys.executable, "-c", PROBE, "-sc", "query=bash"]
    done = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("attn=mha,gqa\n", "")
