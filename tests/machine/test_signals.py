"""What ends a run from outside: Ctrl-C, SIGTERM, a terminal that closes."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from interrupted import begun, once, sent, steps_kept
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from rich.console import Console
from support import command
from tortures.bench import fingerprint

import gptattn.cli.main
import gptattn.training.console_progress
from gptattn.machine.signals import StopRequest
from gptattn.training.console_progress import ConsoleProgress


@pytest.fixture(autouse=True)
def _hangs_up() -> Iterator[None]:
    # Under nohup it is ignored.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def ignored() -> Iterator[Callable[[int], None]]:
    """Ignore a signal until the test ends, as a shell or nohup would."""
    before: dict[int, object] = {}

    def ignore(number: int) -> None:
        before[number] = signal.signal(number, signal.SIG_IGN)

    yield ignore
    for number, handler in before.items():
        signal.signal(number, handler)  # type: ignore[arg-type]


def test_a_closed_terminal_saves_a_run_which_goes_on_exactly(
    whole: Callable[[str], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    once(monkeypatch, "training_step", 2, sent(signal.SIGHUP))
    assert command(tmp_path, *begun(tmp_path)) == 129
    err = capfd.readouterr().err
    assert err.startswith("hung up: stopping after this step\n")
    assert "run holds step 3; to resume: python train.py resume=run" in err
    assert steps_kept(tmp_path / "run")[0] == "step=3.safetensors"
    assert command(tmp_path, "resume=run") == 0
    assert fingerprint(tmp_path / "run") == whole("mha")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_comes_after_the_look_at_a_step_s_end_is_seen_at_the_next(
    number: int,
    whole: Callable[[str], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original, calls = _TrainingEpochLoop._save_loggers_on_train_batch_end, []

    def late(loop: _TrainingEpochLoop) -> None:
        calls.append(loop)
        if len(calls) == 3:  # Lightning's own look follows, and would end the run with 0
            signal.raise_signal(number)
        original(loop)

    monkeypatch.setattr(_TrainingEpochLoop, "_save_loggers_on_train_batch_end", late)
    assert command(tmp_path, *begun(tmp_path)) == 128 + number
    assert steps_kept(tmp_path / "run")[0] == "step=4.safetensors"
    monkeypatch.undo()
    assert command(tmp_path, "resume=run") == 0
    assert fingerprint(tmp_path / "run") == whole("mha")


def test_a_terminal_that_closes_does_not_end_what_nohup_has_started(
    ignored: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ignored(signal.SIGHUP)
    stop = StopRequest()
    with stop.listening():
        signal.raise_signal(signal.SIGHUP)
    assert stop.signum is None
    monkeypatch.setattr(gptattn.cli.main, "_main", sent(signal.SIGHUP))
    assert command(tmp_path) == 0


@pytest.mark.parametrize(
    ("number", "code", "word"),
    [
        (signal.SIGINT, 130, "interrupted"),
        (signal.SIGTERM, 143, "terminated"),
        (signal.SIGHUP, 129, "hung up"),
    ],
)
def test_a_command_obeys_a_signal_while_it_plans(
    number: int,
    code: int,
    word: str,
    ignored: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if number == signal.SIGINT:
        ignored(number)  # as in a process that a script starts in the background
    monkeypatch.setattr(gptattn.cli.main, "_main", sent(number))
    assert command(tmp_path) == code
    assert capfd.readouterr().err == f"{word}\n"


def test_output_to_a_terminal_that_is_gone_raises_nothing_after_the_signal() -> None:
    code = (
        "import os, signal\n"
        "from gptattn.machine.signals import StopRequest\n"
        "terminal, ours = os.openpty()\n"
        "os.dup2(ours, 1), os.dup2(ours, 2), os.close(ours)\n"
        "request = StopRequest()\n"
        "with request.listening():\n"
        "    os.close(terminal)\n"
        "    signal.raise_signal(signal.SIGHUP)\n"
        "    print('a line of progress', flush=True)\n"
        "os._exit(request.signum)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=False)
    assert ended.returncode == signal.SIGHUP


@pytest.mark.parametrize(("done", "left"), [(0.5, "5 d 6 h left"), (0.0, "0%")])
def test_the_time_left_of_a_run_is_said_as_a_person_would(
    done: float, left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gptattn.training.console_progress, "LINE_SECONDS", -1.0)
    console = Console(width=120)
    last = {"train/loss": 1.0, "perf/tokens_per_s": 2.0}
    budget = SimpleNamespace(steps=None, progress=lambda step, seconds: done)
    progress = ConsoleProgress(
        console,
        budget,  # type: ignore[arg-type]
        SimpleNamespace(seconds=452_611.0),  # type: ignore[arg-type]
        SimpleNamespace(last=last),  # type: ignore[arg-type]
        SimpleNamespace(),  # type: ignore[arg-type]
    )
    with console.capture() as shown:
        progress.on_train_batch_end(SimpleNamespace(global_step=7))  # type: ignore[arg-type]
    assert shown.get().strip().endswith(left)
