"""The command line: a mistake costs one line and its exit code, and leaves nothing behind."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from support import command, rows, run_folders, summary, tiny, train

from gptattn.settings.compose import CONF
from gptattn.training.module import LanguageModel


def complaint(text: str) -> str:
    """Return the only line of stderr, which must be an error without a traceback."""
    (line,) = text.splitlines()
    assert line.startswith("error: ")
    assert "Traceback" not in line
    return line


def left_behind(folder: Path) -> list[str]:
    """Return the names in `folder`, without the inputs and the cache."""
    return sorted(
        path.name for path in folder.iterdir() if path.name not in ("text.txt", "cache", "bad.txt")
    )


BAD_INPUT = {
    "unknown variant": ("attn=gqaa", 2, "error: attn: 'gqaa' is unknown; did you mean gqa?"),
    "misspelt key": (
        "model.d_modl=64",
        2,
        "error: model.d_modl: is not a setting; did you mean model",
    ),
    "misspelt top key": (
        "batchsize=4",
        2,
        "error: batchsize: is not a setting; did you mean batch_s",
    ),
    "key of another choice": (
        "attn=mha attn.num_kv_heads=2",
        2,
        "error: attn.num_kv_heads: is not a setting here; cross_layer, differential, gqa, ",
    ),
    "key of another choice in a sweep": (
        "-m attn=mha,gqa seed=1,2 data=pydocs data.path=text.txt",
        2,
        "error: data.path: is not a setting here; bin, hf, shakespeare or text has it: data=",
    ),
    "two flags": ("-m --info=all", 2, "error: command line: --run, --multirun, --cfg, --info and"),
    "a flag amid settings": ("seed=2 --resolve seed=3", 2, "error: command line: settings stand"),
    "word for a number": ("batch_size=many", 2, "error: batch_size: "),
    "number for a word": ("attn.backend=3", 2, "error: attn.backend: '3' is unknown; one of"),
    "word for heads": ("attn=gqa attn.num_kv_heads=two", 2, "error: attn.num_kv_heads: 'two' is a"),
    "heads": ("model.num_heads=3", 2, "error: model.num_heads: num_heads=3 must divide"),
    "kv heads": (
        "attn=gqa attn.num_kv_heads=3",
        2,
        "error: attn.num_kv_heads: num_kv_heads=3 must",
    ),
    "dropout of one": ("model.dropout=1.0", 2, "error: model.dropout: 1.0 is out of range"),
    "negative dropout": ("model.dropout=-0.1", 2, "error: model.dropout: -0.1 is out of range"),
    "long context": ("model.context_length=9999", 2, "error: model.context_length: 9999 is too"),
    "missing file": ("data=text data.path=none.txt", 3, "error: data.path: none.txt does not"),
    "no path": ("data=text", 3, "error: data.path: is not set"),
    "empty folder": ("data=text data.path=.", 3, "error: data.path: no file below ."),
    "unknown character in the prompt": (
        "tokenizer=char sample.prompt=Q",
        3,
        "error: sample.prompt: character 'Q' (U+0051) at offset 0",
    ),
    "unknown character in the text": (
        "tokenizer=char tokenizer.characters=Line",
        3,
        "error: data: character ' ' (U+0020) at offset 4",
    ),
    "no steps": ("budget.steps=0", 2, "error: budget.steps: 0 is not a positive number"),
    "no seconds": ("budget.steps=null budget.seconds=0", 2, "error: budget.seconds: 0.0 is not a"),
    "no tokens": ("budget.steps=null budget.tokens=0", 2, "error: budget.tokens: 0 is not a"),
    "foreign class": ("attn._target_=os.system", 2, "error: attn._target_: os.system is outside"),
    "a model for no machine": (
        "model.d_model=65536 model.num_layers=1000",
        2,
        "error: model: more than ",
    ),
    "a sweep without its flag": ("hydra.mode=MULTIRUN", 2, "error: hydra.mode: MULTIRUN makes a"),
    "resolving for nobody": ("--resolve", 2, "error: --resolve: works only with --cfg or"),
    "unreadable override": ("attn", 2, "error: attn: cannot be read; write name=value"),
    "sweep without -m": ("attn=mha,gqa", 2, "error: attn: mha,gqa gives several choices; add -m"),
    "all without -m": ("attn=glob(*)", 2, "error: attn: glob(*) gives several choices; add -m"),
    "values without -m": ("seed=1,2", 2, "error: seed: 1,2 gives several values; add -m"),
    "a sweeper for one variant": (
        "hydra/sweeper=optuna",
        2,
        "error: hydra/sweeper: 'optuna' is not used here; python scripts/tune.py searches",
    ),
}


@pytest.mark.parametrize(("arguments", "code", "said"), BAD_INPUT.values(), ids=BAD_INPUT)
def test_a_mistake_is_one_line_with_its_field_and_leaves_nothing(
    arguments: str,
    code: int,
    said: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    own = arguments.split(" ")
    overrides = tiny(tmp_path, *own)
    if any("data.path=." in override for override in own):
        (tmp_path / "text.txt").unlink()
    assert command(tmp_path, *overrides) == code
    out, err = capfd.readouterr()
    assert complaint(err).startswith(said)
    assert out == ""
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "is empty"), (b"a\0b", "NUL at byte 1"), (b"caf\xe9s", "at offset 3")],
)
def test_a_file_that_is_no_text_is_one_line_with_its_name(
    content: bytes, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.txt").write_bytes(content)
    assert command(tmp_path, *tiny(tmp_path, "data=text", "data.path=bad.txt")) == 3
    line = complaint(capfd.readouterr().err)
    assert line.startswith("error: data.path: bad.txt ")
    assert said in line
    assert left_behind(tmp_path) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = [o for o in tiny(tmp_path) if not o.startswith("trainer")]
    assert command(tmp_path, *arguments, "trainer=gpu") == 2
    assert complaint(capfd.readouterr().err).startswith("error: trainer: no GPU is visible")
    assert left_behind(tmp_path) == []


def test_debug_shows_the_traceback_before_the_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path, *tiny(tmp_path), "model.num_heads=3", "--debug") == 2
    *trace, last = capfd.readouterr().err.splitlines()
    assert trace[0].startswith("Traceback")
    assert last.startswith("error: model.num_heads: ")


def test_a_bad_value_anywhere_in_a_sweep_stops_it_before_the_first_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = tiny(tmp_path, "attn=mha,gqa", "attn.scale=1.0,wide", "-m")
    assert command(tmp_path, *arguments) == 2
    assert complaint(capfd.readouterr().err).startswith("error: attn.scale: 'wide' is a str")
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_shows_examples_choices_and_settings(
    flag: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path, flag) == 0
    out, err = capfd.readouterr()
    assert "python train.py attn=gqa" in out
    assert "python train.py -m attn=mha,gqa,mqa seed=1,2,3" in out
    menu = sorted(file.stem for file in (CONF / "attn").glob("*.yaml"))
    assert f"attn: {', '.join(menu)}\n" in out.replace("\n    ", " ")
    assert "batch_size: 16" in out
    assert err == ""
    assert left_behind(tmp_path) == []


def test_the_settings_can_be_shown_without_a_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path, "attn=gqa", "--cfg", "job") == 0
    assert "num_kv_heads: 2" in capfd.readouterr().out
    assert left_behind(tmp_path) == []


def test_a_folder_that_holds_a_run_is_not_taken_and_not_touched(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = [*tiny(tmp_path, "hydra.run.dir=mine"), "checkpoint=false"]
    assert command(tmp_path, *arguments) == 0
    before = {f: f.read_bytes() for f in (tmp_path / "mine").iterdir() if f.is_file()}
    capfd.readouterr()
    assert command(tmp_path, *arguments, "seed=2") == 6
    assert complaint(capfd.readouterr().err).startswith("error: hydra.run.dir: ")
    assert {f: f.read_bytes() for f in (tmp_path / "mine").iterdir() if f.is_file()} == before
    assert "seed=2" not in (tmp_path / "mine" / ".hydra" / "overrides.yaml").read_text()


def test_a_folder_that_cannot_be_made_is_a_disk_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = tiny(tmp_path, "hydra.run.dir=text.txt/run")
    assert command(tmp_path, *arguments) == 7
    assert "text.txt" in complaint(capfd.readouterr().err)
    assert left_behind(tmp_path) == []


def test_a_full_disk_is_a_disk_error_and_leaves_no_half_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert command(tmp_path, *tiny(tmp_path)) == 7
    assert "No space left on device" in complaint(capfd.readouterr().err)
    assert not list(tmp_path.rglob("*.part"))
    assert not list(tmp_path.rglob("*.safetensors"))
    assert run_folders(tmp_path) == []


def test_a_cache_that_cannot_be_written_is_a_disk_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path, *tiny(tmp_path), "cache_dir=text.txt") == 7
    assert complaint(capfd.readouterr().err).startswith("error: cache_dir: ")
    assert left_behind(tmp_path) == []


def test_a_loss_that_is_not_finite_stops_the_run_at_its_step(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = tiny(tmp_path, "optim.lr=1e30", "optim.warmup_fraction=0", "validation.count=4")
    assert command(tmp_path, *arguments) == 5
    line = complaint(capfd.readouterr().err)
    # The first update ruins the weights, so step 1 or the step after it notices.
    assert line.startswith(("error: train/loss: ", "error: val/loss: ", "error: train/grad_norm: "))
    assert "step 1" in line or "step 2" in line
    assert run_folders(tmp_path) == []
    assert not list(tmp_path.rglob("*.safetensors"))


def in_step(monkeypatch: pytest.MonkeyPatch, step: int, act: Callable[[], object]) -> list[str]:
    """Call `act` at the start of training step `step`; return the variants trained so far."""
    training_step, trained = LanguageModel.training_step, []

    def wrapped(self: LanguageModel, batch: object, batch_idx: int) -> object:
        attention = self.model.layers()[0].attention
        if self.global_step == 0:
            trained.append(type(attention).__name__)
        if self.global_step == step:
            act()
        return training_step(self, batch, batch_idx)  # type: ignore[arg-type]

    monkeypatch.setattr(LanguageModel, "training_step", wrapped)
    return trained


def interrupt() -> NoReturn:
    raise KeyboardInterrupt


def test_ctrl_c_ends_a_run_with_130(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    in_step(monkeypatch, 2, interrupt)
    assert command(tmp_path, *tiny(tmp_path, "attn=gqa")) == 130
    assert "interrupted" in capfd.readouterr().err.splitlines()
    assert run_folders(tmp_path) == []


def test_a_termination_ends_a_run_with_143(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    in_step(monkeypatch, 2, lambda: signal.raise_signal(signal.SIGTERM))
    assert command(tmp_path, *tiny(tmp_path, "attn=gqa")) == 143
    assert "Traceback" not in capfd.readouterr().err
    assert run_folders(tmp_path) == []


def test_an_interrupted_run_keeps_the_rows_that_were_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_step(monkeypatch, 3, interrupt)
    assert command(tmp_path, *tiny(tmp_path, "hydra.run.dir=run")) == 130
    assert [row["step"] for row in rows(tmp_path / "run") if "train/loss" in row] == [1, 2, 3]


def test_the_console_shows_progress_a_sample_the_result_and_where_the_run_is(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = train(tmp_path, "attn=gqa", "budget.steps=2")
    out, err = capfd.readouterr()
    assert err == ""
    for shown in ("gqa: costs", "step 2", "bits/byte", "sample", "gqa: result"):
        assert shown in out
    assert "\x1b" not in out
    assert f"run: {run.relative_to(tmp_path)}" in out
    assert f"look: tensorboard --logdir {run.parent.relative_to(tmp_path)}" in out
    assert f"{summary(run)['metrics']['cost/params']:,}" in out


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ("attn=gqaa", 2, "error: attn: "),
        ("data=text data.path=none.txt", 3, "error: data.path: "),
        ("--help", 0, ""),
    ],
)
def test_a_process_of_its_own_says_and_returns_the_same(
    arguments: str, code: int, said: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, str(CONF.parent / "train.py"), *arguments.split(" ")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")},
    )
    assert done.returncode == code
    assert done.stderr.startswith(said)
    assert len(done.stderr.splitlines()) == bool(code)
    assert left_behind(tmp_path) == []
