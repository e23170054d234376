"""Untrusted configs: nothing that they name is run, and each is refused quickly."""

import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml
from support import check_job, command, tiny

from gptattn.settings.compose import composed, to_train_config
from gptattn.cli.ending import as_user_error
from gptattn.errors import CheckpointError, ConfigError, UserError
from gptattn.machine.untrusted import check_yaml, read_yaml
from gptattn.runs.load import load_config
from gptattn.settings.construct import find_target
from gptattn.settings.targets import check_targets

NAMES = str.split(
    "os.system os.mkdir os.popen os.execv posix.system subprocess.Popen subprocess.run "
    "subprocess.check_output builtins.eval builtins.exec builtins.open builtins.__import__ "
    "builtins.getattr builtins.compile io.open importlib.import_module runpy.run_path "
    "runpy.run_module shutil.copyfile shutil.rmtree shutil.move pathlib.Path pathlib.Path.touch "
    "pickle.loads marshal.loads ctypes.CDLL pty.spawn timeit.timeit code.interact "
    "functools.partial operator.methodcaller tempfile.mkdtemp logging.FileHandler "
    "logging.config.dictConfig urllib.request.urlretrieve webbrowser.open "
    "hydra.utils.instantiate hydra.utils.call hydra._internal.utils._locate torch.load "
    "torch.hub.load torch.save numpy.load numpy.save yaml.unsafe_load yaml.load "
    # Names that lead out of this package, or to parts of it that no group may name.
    "gptattn gptattn. gptattn.data.text.os.system gptattn.data.text:os.system "
    "gptattn.data.tokens.os.unlink gptattn.attention.base.torch.load gptattn.cli.main.main "
    "gptattn.runs.checkpoint.write_atomically gptattn.training.recorder.RunRecorder gptattnx.Evil "
    "gptattn.data.text._fetch gptattn.attention.__class__ gptattn.data.text.__builtins__ "
    "gptattn.attention..MultiHeadAttention"
)


def test_there_are_sixty_targets() -> None:
    assert len(NAMES) == len(set(NAMES)) >= 60


@pytest.mark.parametrize("target", NAMES)
@pytest.mark.parametrize("group", ["attn", "data", "position"])
def test_a_target_outside_of_its_groups_home_is_refused(group: str, target: str) -> None:
    start = time.process_time()
    with pytest.raises(ConfigError) as error:
        find_target(group, {"_target_": target}, [])
    assert error.value.field == f"{group}._target_"
    for below in ({"x": {"_target_": target}}, {"x": [1, {"y": {"_target_": target}}]}):
        with pytest.raises(ConfigError, match="_target_"):
            check_targets({"attn": below, "seed": 1}, [])
    assert time.process_time() - start < 1


def overlay(folder: Path, name: str, node: object) -> str:
    """Write a config folder with one file; return the flag that adds it."""
    file = folder / "theirs" / f"{name}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("# @package _global_\n" + yaml.safe_dump(node), encoding="utf-8")
    return f"--config-dir={folder / 'theirs'}"


# Each makes a config that would run the given shell command.
NODES: dict[str, Callable[[str], object]] = {
    "callback": lambda c: {"hydra": {"callbacks": {"a": {"_target_": "os.system", "command": c}}}},
    "launcher": lambda c: {"hydra": {"launcher": {"_target_": "os.system", "command": c}}},
    "sweeper": lambda c: {"hydra": {"sweeper": {"_target_": "os.system", "command": c}}},
    "log handler": lambda c: {
        "hydra": {"job_logging": {"handlers": {"a": {"()": "os.system", "command": c}}}}
    },
    "log class": lambda c: {
        "hydra": {"job_logging": {"handlers": {"a": {"class": "subprocess.Popen", "args": c}}}}
    },
    "log stream": lambda c: {
        "hydra": {"hydra_logging": {"handlers": {"a": {"stream": "ext://os.environ"}}}}
    },
    "attention": lambda c: {"attn": {"_target_": "os.system", "command": c}},
    "its own package": lambda c: {
        "allow_targets": ["os"],
        "attn": {"_target_": "os.system", "command": c},
    },
    "nested": lambda c: {"data": {"a": {"b": [{"_target_": "os.system", "command": c}]}}},
    "environment": lambda c: {"hydra": {"job": {"env_set": {"LD_PRELOAD": "/tmp/a.so"}}}},
}


@pytest.mark.parametrize("name", NODES)
def test_a_config_of_somebody_else_runs_nothing(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    canary = tmp_path / "canary"
    flag = overlay(tmp_path, "experiment/evil", NODES[name](f"mkdir {canary}"))
    assert command(tmp_path / "work", flag, *tiny(tmp_path / "work"), "+experiment=evil") == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert not canary.exists()
    assert not (tmp_path / "work" / "outputs").exists()


def test_a_pickle_of_hydras_is_not_read(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.pickle").write_bytes(b"cos\nsystem\n(S'mkdir canary'\ntR.")
    assert command(tmp_path, "--experimental-rerun", str(tmp_path / "config.pickle")) == 2
    assert "error: --experimental-rerun: " in capfd.readouterr().err
    assert not (tmp_path / "canary").exists()


# Paths

PATHS = [
    "attn=../../evil",
    "attn=..",
    "attn=/etc/passwd",
    "attn='..\\\\..\\\\evil'",
    "attn=sub/../../../evil",
    "model=../attn/mha",
    "data=../../../../../../../../etc/hosts",
    "tokenizer=./../evil",
    "optim=a/../../evil",
    "trainer=/tmp/evil.yaml",
    "experiment=../../evil",
    "launcher=../evil",
    "position='C:\\\\evil'",
    "hydra/job_logging=../../../evil",
    "hydra/launcher=../../evil",
    "hydra/sweeper=/tmp/evil",
    "+hydra/callbacks=../../evil",
    "+experiment@model=../../evil",
    "attn@model=../../evil",
    "+../../evil=a",
]


@pytest.mark.parametrize("override", PATHS)
def test_a_choice_that_leaves_its_folder_is_refused(override: str, tmp_path: Path) -> None:
    assert len(PATHS) == 20
    (tmp_path / "evil.yaml").write_text("seed: 666\n")
    start = time.process_time()
    with pytest.raises(Exception, match=r".") as error, composed([override]) as cfg:
        to_train_config(cfg)
    known = as_user_error(error.value)
    assert isinstance(known, UserError)
    assert known.exit_code == 2
    assert time.process_time() - start < 1


def test_a_file_of_somebody_else_names_no_file_outside(tmp_path: Path) -> None:
    (tmp_path / "evil.yaml").write_text("seed: 666\n")
    overlay(tmp_path, "experiment/evil", {"defaults": ["../../evil"]})
    search = f"hydra.searchpath=[file://{tmp_path / 'theirs'}]"
    with (
        pytest.raises(ConfigError, match="points outside the folder"),
        composed([search, "experiment=evil"]),
    ):
        pass


# Bombs


def laughs(levels: int = 9, width: int = 9) -> str:
    lines = ["a0: &a0 [lol]"]
    for i in range(1, levels + 1):
        lines.append(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * width)}]")
    return "\n".join(lines)


BOMBS: dict[str, str] = {
    "a billion laughs": laughs(),
    "twos": laughs(40, 2),
    "as keys of one line": "{a: &a [x,x,x,x,x,x,x,x], b: &b [*a,*a,*a,*a,*a,*a,*a,*a], "
    "c: &c [*b,*b,*b,*b,*b,*b,*b,*b], d: &d [*c,*c,*c,*c,*c,*c,*c,*c], e: &e [*d,*d,*d,*d,*d,*d,*d,"
    "*d], f: [*e,*e,*e,*e,*e,*e,*e,*e]}",
    "merged": "a: &a {x: 1}\n"
    + "\n".join(
        f"{'bcdefghijklmnopqrst'[i]}: &{'bcdefghijklmnopqrst'[i]} "
        f"{{k: [*{'abcdefghijklmnopqrs'[i]}, *{'abcdefghijklmnopqrs'[i]}]}}"
        for i in range(19)
    ),
    "itself": "&a [*a, *a]",
    "itself, by name": "&a {x: {y: *a}}",
    "deep lists": "[" * 60_000,
    "deep tables": "{a: " * 40_000,
    "deep by indent": "\n".join(" " * i + "a:" for i in range(400)),
    "many values": "[" + "1," * 80_000 + "]",
    "large": "a: " + "x" * 1_100_000,
    "python objects": "!!python/object/apply:os.system [mkdir canary]",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_in_yaml_is_refused_at_once_wherever_it_lies(name: str, tmp_path: Path) -> None:
    assert len(BOMBS) >= 10
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(BOMBS[name])
    theirs = tmp_path / "theirs" / "experiment"
    theirs.mkdir(parents=True)
    (theirs / "evil.yaml").write_text(BOMBS[name])
    start = time.process_time()
    with pytest.raises(CheckpointError) as error:
        load_config(run)
    assert "\n" not in str(error.value)
    assert time.process_time() - start < 1
    start = time.process_time()
    with (
        pytest.raises(Exception, match=r".") as raised,
        composed([f"hydra.searchpath=[file://{theirs.parent}]", "experiment=evil"]),
    ):
        pass
    assert isinstance(as_user_error(raised.value), ConfigError)
    assert time.process_time() - start < 1


def test_aliases_that_stand_for_little_are_read(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("a: &a {x: 1}\nb: *a\nc: {<<: *a, y: 2}\n")
    assert read_yaml(file, 100) == {"a": {"x": 1}, "b": {"x": 1}, "c": {"x": 1, "y": 2}}
    check_yaml(laughs(3, 9))
    with pytest.raises(ValueError, match="more than 50,000 values"):
        check_yaml(laughs(5, 9))


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_a_config_that_is_no_file_is_not_waited_for(
    make: Callable[[Path], object], tmp_path: Path
) -> None:
    make(tmp_path / "config.yaml")
    with pytest.raises(CheckpointError, match="not a regular file"):
        load_config(tmp_path)


@pytest.mark.parametrize("content", ["7", "'7'", "word", "true", "[1]", "!!set {a}", "2001-01-01"])
@pytest.mark.parametrize("group", ["attn", "experiment"])
def test_a_file_that_holds_no_settings_is_refused_by_name(
    group: str, content: str, tmp_path: Path
) -> None:
    file = tmp_path / group / "odd.yaml"
    file.parent.mkdir()
    file.write_text(f"# @package _global_\n{content}\n")
    with (
        pytest.raises(ConfigError, match="no settings") as error,
        composed([f"hydra.searchpath=[file://{tmp_path}]", f"{group}=odd"]),
    ):
        pass
    assert error.value.field == str(file)


@pytest.mark.parametrize("override", ["match_to=odd", "attn=odd"])
def test_a_number_in_the_place_of_a_variant_is_refused(override: str, tmp_path: Path) -> None:
    (tmp_path / "attn").mkdir()
    (tmp_path / "attn" / "odd.yaml").write_text("7\n")
    search = f"hydra.searchpath=[file://{tmp_path}]"
    with pytest.raises(ConfigError, match="no settings"):
        check_job(tiny(tmp_path, search, "match=params", override))


HUGE = "9" * 309  # larger than the largest float


@pytest.mark.parametrize("text", [f"optim: {{lr: {HUGE}}}", f"optim: {{lr: -{HUGE}}}"])
def test_a_number_that_no_float_can_hold_names_its_setting(text: str, tmp_path: Path) -> None:
    flag = overlay(tmp_path, "experiment/huge", yaml.safe_load(text))
    with pytest.raises(ConfigError, match=r"^optim\.lr: .* too large"):
        check_job([f"hydra.searchpath=[file://{flag.partition('=')[2]}]", "experiment=huge"])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("experiment_name: 2001-01-01", "experiment_name: .* is a date; give str"),
        ("seed: one", "seed: 'one' is not an int; give one"),
        ("seed: true", "seed: True is a bool; give int"),
        ("allow_targets: none", "allow_targets: 'none' is a str; give list"),
        ("sweep: 7", "sweep: 7 is not a table; give one with jobs, fresh, keep_stale, minutes"),
        ("model: {num_layers: 2}", "model.num_heads: is missing; this version needs a value"),
        ("news: 7", "news: is not a setting; "),
        ("batch_size: 0", "batch_size: 0 is not a positive number"),
    ],
)
def test_a_value_of_another_type_in_a_runs_config_is_told_in_one_line(
    line: str, said: str, tmp_path: Path
) -> None:
    node = asdict(check_job(tiny(tmp_path))) | yaml.safe_load(line)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(node))
    with pytest.raises(CheckpointError, match=said) as error:
        load_config(tmp_path)
    assert "\n" not in str(error.value)


def test_the_packages_that_a_user_adds_count_from_the_command_line(tmp_path: Path) -> None:
    assert check_job(tiny(tmp_path, "allow_targets=[mine]")).allow_targets == ["mine"]


@pytest.mark.parametrize("name", ["default", "disabled", "none", "stdout"])
def test_hydras_own_logging_can_be_chosen(name: str) -> None:
    with composed([f"hydra/job_logging={name}"]) as cfg:
        assert cfg.hydra.job_logging.version == 1


@pytest.mark.parametrize("group", ["job_logging", "hydra_logging"])
def test_a_change_of_hydras_logging_is_refused(group: str) -> None:
    with (
        pytest.raises(ConfigError, match=rf"^hydra\.{group}: differs from Hydra's own; use one"),
        composed([f"hydra/{group}=default", f"hydra.{group}.root.level=DEBUG"]),
    ):
        pass
