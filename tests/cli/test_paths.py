"""A path means one place, whoever reads it, and a file of the user's is never replaced."""

from pathlib import Path

import pytest
import yaml
from interrupted import content
from support import command, is_complaint, refuses, tiny

from gptattn.machine.disk import PART, claim_folder, expand_path, remove_partials
from gptattn.runs.folder import name_run
from gptattn.runs.overrides import leave_out_defaults
from gptattn.settings.compose import settings


def test_a_folder_is_ours_once_we_have_taken_it_without_a_file_in_the_way(tmp_path):
    folder = tmp_path / "new"
    folder.mkdir()
    (folder / "a.csv").write_text("mine")
    with refuses("out: a.csv", 6):
        claim_folder(folder, "kind", "out", "a.csv", "b.*")
    claim_folder(folder, "kind", "out", "b.png")
    for name in ("b.png", "movie.part", f"b.png.1{PART}"):
        (folder / name).touch()
    claim_folder(folder, "kind", "out", "b.png")
    remove_partials(folder)
    assert {"a.csv", "b.png", "movie.part"} == {p.name for p in folder.iterdir()} - {
        ".gptattn-kind"
    }
    with refuses("to: a.csv", 6):
        claim_folder(folder / "a.csv", "kind", "to", "b")


# What is in the way -> the command, where DIR is the user's folder, RUN a model's.
COMMANDS = {
    "layer_07.png": ("attention_map", "run=RUN", "prompt=ab", "out=DIR"),
    "tokenizer": ("convert", "from=RUN", "to=mqa", "out=DIR"),
    "config.json": ("convert", "from=RUN", "to=hf", "out=DIR"),
    "model.safetensors": ("convert", "from=RUN", "to=hf", "out=DIR"),
    "tokens.bin": ("prepare", "to=DIR", "data=text", "data.path=TEXT"),
    "comparison.csv": ("compare", "RUN", "out=DIR"),
}


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.usefixtures("undrawn")
def test_a_command_refuses_a_folder_with_a_file_in_its_way(name, tmp_path, call, runs):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / name).write_text("mine")
    (mine / "notes.part").write_text("mine")
    before = content(mine)
    places = {"DIR": mine, "RUN": runs("mha"), "TEXT": runs("mha").parents[2] / "text.txt"}
    program, *given = COMMANDS[name]
    for place, path in places.items():
        given = [argument.replace(place, str(path)) for argument in given]
    code, _, err = call(program, *given)
    assert (code, content(mine)) == (6, before)
    assert name in err.splitlines()[-1]


@pytest.mark.parametrize("name", ["summary.json", "checkpoints", "metrics.jsonl"])
def test_a_run_takes_no_folder_with_a_file_in_its_way(name, tmp_path, capfd):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / name).write_text("mine")
    before = content(mine)
    assert command(tmp_path, *tiny(tmp_path, "run_dir=mine")) == 6
    assert is_complaint(capfd.readouterr().err, f"run_dir: {name}")
    assert content(mine) == before


def test_a_sweep_replaces_no_record_of_others(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "sweep.json").write_text("mine")
    given = ["-m", "seed=1,2", "hydra.sweep.dir='~/home'", *tiny(tmp_path / "work")]
    assert command(tmp_path / "work", *given) == 6
    assert is_complaint(capfd.readouterr().err, "hydra.sweep.dir: sweep.json")
    assert (tmp_path / "home" / "sweep.json").read_text() == "mine"


def test_only_a_tilde_at_the_start_of_a_typed_path_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    places = {
        "~/a": tmp_path / "a",
        "a/~/b": Path("a/~/b"),
        "$HOME/{x} y": Path("$HOME/{x} y"),
        "/a": Path("/a"),
    }
    for typed, place in places.items():
        assert expand_path(typed, "out") == expand_path(str(place), "out") == place
    with refuses("out: no such home"):
        expand_path("~nobody-of-this-name/x", "out")


@pytest.mark.parametrize("place", ["'~/a run'", r"'$HOME {1}'", "a::b"])
def test_all_files_of_a_run_are_in_the_folder_that_was_typed(place, tmp_path, monkeypatch, capfd):
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    assert command(work, *tiny(work, f"run_dir={place}", "logger=[csv]")) == 0
    name = place.strip("'").removeprefix("~/")
    run = (home if "~" in place else work) / name
    files = {path.name.partition(".")[0] for path in run.iterdir()}
    assert files >= {"summary", "events", "checkpoints", "trackers"}
    assert sorted(path.name for path in (*home.iterdir(), *work.iterdir())) == sorted(
        ["text.txt", "cache", name]
    )
    assert command(work, f"resume={place}", "budget.steps=9") == 0
    assert "\nrun: " in capfd.readouterr().out


def test_a_text_with_a_relative_path_is_found_from_every_folder(tmp_path, capfd):
    path = "data.path=text.txt"
    assert command(tmp_path, *tiny(tmp_path, path, "run_dir=run")) == 0
    recorded = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert recorded["data"]["path"] == str(tmp_path / "text.txt")
    assert command(tmp_path / "elsewhere", "resume=../run", "budget.steps=9") == 0


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ("optim=adamw model=tiny budget.steps=1000 data=text data.path='/tmp/a.txt'",
         "mha_s1+data-text+path-a.txt"),
        ("model=gpt2_small model.num_layers=12 model.d_model=128 seed=23",
         "mha_s23+model-gpt2_small+d_model-128"),
        ("recipe=llama3 block=llama model.context_length=64", "llama3_s1+context_length-64"),
        ("pattern=[sliding,sliding,sliding,gqa] model.num_layers=8 attn.window=7",
         "sliding-sliding-sliding-gqa_s1+num_layers-8+window-7"),
    ],
)  # fmt: skip
def test_a_run_is_named_by_what_was_typed_without_defaults(overrides, name):
    given = overrides.split()
    cfg = settings(given)
    found = name_run(cfg, leave_out_defaults(cfg, given))
    assert found.startswith(f"{name}_")
    assert len(found) <= 60
