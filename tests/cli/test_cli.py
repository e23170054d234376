"""The command line: a mistake costs one line and its exit code, and leaves nothing behind."""

import re
from pathlib import Path

import pytest
import yaml
from support import command, is_complaint, summary, tiny, train

from gptattn.settings.comments import OVER_OTHERS, read_comments
from gptattn.settings.compose import CONF
from gptattn.settings.identity import flat


def left_behind(folder: Path) -> list[str]:
    """Return the names in `folder`, without the inputs and the cache."""
    return sorted(path.name for path in folder.iterdir() if path.name not in ("text.txt", "cache"))


# One of each exit code, and those of the command itself; tests/settings/test_mistakes.py has the
# mistakes in the settings of one run.
MISTAKES = {
    "hydra.run.dir=mine": (2, "hydra.run.dir: run_dir="),
    "model.num_heads=3": (2, "model.num_heads: divide"),
    "seed=2 --resolve seed=3": (2, "command line: --resolve"),
    "--attn gqa seed=2": (2, "command line: write attn=gqa"),
    "-batch-size=4 seed=2": (2, "command line: write batch_size=4"),
    "--hlep": (2, "command line: --help"),
    "-m hydra/sweeper=basic": (2, "hydra/sweeper: hydra.sweeper.tune"),
    "hydra.sweeper.params={seed:'1,2'}": (2, "command line: -m"),
    "-m pattern=[gqa,mqa] model.num_layers=2 attn.num_kv_heads=3": (
        2,
        "attn.num_kv_heads: [1, 2, 4]",
    ),
    "-m run_dir=mine": (2, "run_dir: -m"),
    "resume=none run_dir=mine": (2, "run_dir: cannot be combined with resume"),
    "resume=3": (4, "resume: no run"),  # Hydra reads a number
    "run_dir=text.txt/run": (7, "text.txt/run: path"),
}


@pytest.mark.parametrize("arguments", MISTAKES)
def test_a_mistake_is_one_line_with_its_field_and_leaves_nothing(arguments, tmp_path, capfd):
    code, said = MISTAKES[arguments]
    flags, own = (["-m"], arguments[3:]) if arguments.startswith("-m") else ([], arguments)
    given = [*flags, *tiny(tmp_path, *own.split(" "))]
    assert command(tmp_path, *given) == code
    out, err = capfd.readouterr()
    assert is_complaint(err, said)
    assert out == "" or flags
    assert left_behind(tmp_path) == []


def test_a_traceback_is_shown_if_it_is_asked_for(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("gptattn.cli.train.SHOWS_TRACEBACK", True)  # HYDRA_FULL_ERROR=1
    assert command(tmp_path, "model.num_heads=3") == 2
    *trace, last = capfd.readouterr().err.splitlines()
    assert trace[0].startswith("Traceback")
    assert is_complaint(last, "model.num_heads: divide")


def test_help_shows_examples_choices_and_settings(tmp_path, capfd):
    assert command(tmp_path, "--help") == 0
    out, err = capfd.readouterr()
    assert "python train.py -m attn=mha,gqa,mqa seed=1,2,3" in out
    for file in (CONF / "attn").glob("*.yaml"):
        assert f"\n    {file.stem} " in out
    assert "batch_size=16            sequences per optimizer step\n" in out
    assert not [word for word in ("${", "hydra.") if word in out]
    assert (err, [line for line in out.splitlines() if len(line) > 100]) == ("", [])
    assert left_behind(tmp_path) == []


FILES = [file for file in CONF.glob("*/*.yaml") if file.parent.name not in OVER_OTHERS]


@pytest.mark.parametrize("file", [CONF / "train.yaml", *FILES], ids=lambda file: file.stem)
def test_every_setting_in_a_yaml_file_has_a_comment(file):
    found = flat(yaml.load(file.read_text(encoding="utf-8"), yaml.BaseLoader))
    names = [re.sub(r"\[.*", "", name) for name in found]
    own = [one for one in names if one and not re.search(r"^(defaults|hydra)\b|_target_$", one)]
    comments = read_comments(file, "GROUP")
    assert [one for one in own if not any(c.endswith(one) for c in comments)] == []


def test_the_console_shows_progress_a_sample_the_result_and_the_folder(tmp_path, capfd):
    run = train(tmp_path, "attn=gqa", "budget.steps=2")
    out, err = capfd.readouterr()
    assert err == ""
    assert "[bold]" not in out
    for shown in ("gqa: costs", "step 2", "bits/byte", "sample", "gqa: result"):
        assert shown in out
    assert "\x1b" not in out
    assert f"run: {run.relative_to(tmp_path)}" in out
    assert f"curves: tensorboard --logdir {run.parent.relative_to(tmp_path)}" in out
    assert f"{summary(run)['metrics']['cost/params']:,}" in out
