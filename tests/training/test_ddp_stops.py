"""Where one process of a run stops, dies or fails, all of them end, and the run can be resumed."""

import datetime
import math
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest
import torch
from ranks import SHARED, Ranks, resumed, trained
from support import rows, tiny
from tortures.bench import fingerprint, unreadable

import gptattn.machine.world
from gptattn.data.sampler import Batch
from gptattn.data.tokens import TokenData
from gptattn.errors import OutOfMemory
from gptattn.model.gpt import GPT
from gptattn.runs.folder import RunFolder
from gptattn.training.datamodule import RunDataModule
from gptattn.training.module import LanguageModel

DROPS = "model.dropout=0.2"
RESUME = "resume=... continues from the newest checkpoint, if any"
DIED = f"error: trainer.devices: another process of this run has died; {RESUME}"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The fingerprint of an undisturbed run of two processes."""
    return fingerprint(trained(tmp_path_factory.mktemp("whole"), DROPS))


def at(
    step: int, ranks: Sequence[int], act: Callable[[], object], hook: str = "training_step"
) -> Callable[[int], None]:
    """Call `act` in the processes of these ranks, in this hook after `step` whole steps."""

    def inside(own: int) -> None:
        original = getattr(LanguageModel, hook)

        def wrapped(self: LanguageModel, *args: object) -> None:
            if self.global_step == step and own in ranks:
                act()
            original(self, *args)

        setattr(LanguageModel, hook, wrapped)

    return inside


def disturbed(folder: Path, inside: Callable[[int], object], *overrides: str) -> Ranks:
    return Ranks(folder, *tiny(folder, *SHARED, DROPS, *overrides), inside=inside)


@pytest.mark.parametrize(
    ("rank", "hook", "saved"), [(0, "validation_step", 2), (1, "training_step", 3)]
)
def test_a_signal_to_any_process_saves_and_ends_all(
    rank: int, hook: str, saved: int, whole: str, tmp_path: Path
) -> None:
    asked = at(2, [rank], lambda: signal.raise_signal(signal.SIGTERM), hook)
    ranks = disturbed(tmp_path, asked)
    assert ranks.codes() == [143, 143], ranks.text()
    assert ranks.text().count("terminated: stopping after this step") == 1
    assert ranks.text().count(f"holds step {saved}; to resume: ") == 1
    resumed(tmp_path)
    assert fingerprint(tmp_path / "run") == whole


def test_a_signal_before_the_first_step_ends_all_after_it(tmp_path: Path) -> None:
    def inside(rank: int) -> None:
        original = RunDataModule.train_dataloader

        def wrapped(self: RunDataModule) -> Iterable[Batch]:
            if rank == 1:
                signal.raise_signal(signal.SIGTERM)
            return original(self)

        RunDataModule.train_dataloader = wrapped  # type: ignore[method-assign]

    ranks = disturbed(tmp_path, inside)
    assert ranks.codes() == [143, 143], ranks.text()
    assert "holds step 1; to resume: " in ranks.text()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_process_ends_the_others_and_leaves_the_checkpoints_whole(
    rank: int, whole: str, tmp_path: Path
) -> None:
    ranks = disturbed(tmp_path, at(4, [rank], lambda: os.kill(os.getpid(), signal.SIGKILL)))
    codes = ranks.codes()
    assert codes[rank] == -signal.SIGKILL
    assert codes[1 - rank] == 1
    # The first process speaks for all; where it has died, its launcher does.
    assert ranks.errors() == [DIED] * (rank == 1)
    run = tmp_path / "run"
    assert unreadable(run) == 0
    assert RunFolder(run).known_checkpoints()[0].name == "step=4.safetensors"
    resumed(tmp_path)
    assert fingerprint(run) == whole


def test_a_loss_that_is_not_finite_in_one_process_ends_all_with_one_line(tmp_path: Path) -> None:
    def inside(rank: int) -> None:
        original, calls = GPT.loss, [0]

        def wrapped(self: GPT, *args: object, **kwargs: object) -> torch.Tensor:
            calls[0] += self.training
            loss = original(self, *args, **kwargs)  # type: ignore[arg-type]
            # Two micro-batches a step: the first of step 3. The gradients stay finite.
            return loss + math.inf if rank == 1 and calls[0] == 5 else loss

        GPT.loss = wrapped  # type: ignore[method-assign,assignment]

    ranks = disturbed(tmp_path, inside)
    assert ranks.codes() == [5, 5], ranks.text()
    (line,) = ranks.errors()
    assert line.startswith("error: train/loss: is inf at step 3; ")
    assert [path.name for path in RunFolder(tmp_path / "run").known_checkpoints()] == [
        "step=2.safetensors"
    ]


def test_gradients_that_are_not_finite_in_one_process_end_all_with_one_line(tmp_path: Path) -> None:
    def inside(rank: int) -> None:
        original = LanguageModel.manual_backward

        def wrapped(self: LanguageModel, loss: torch.Tensor) -> None:
            bad = rank == 1 and self.global_step == 2
            original(self, loss * torch.where(loss > 0, math.nan, 1.0) if bad else loss)

        LanguageModel.manual_backward = wrapped  # type: ignore[method-assign,assignment]

    ranks = disturbed(tmp_path, inside)
    assert ranks.codes() == [5, 5], ranks.text()
    (line,) = ranks.errors()
    assert line.startswith("error: train/grad_norm: is nan at step 3; ")


def _fail(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("rank", "hook"), [(0, "training_step"), (1, "training_step"), (0, "on_save_checkpoint")]
)
def test_a_failure_of_one_process_is_said_once_by_it_and_ends_all(
    rank: int, hook: str, tmp_path: Path
) -> None:
    failure = OutOfMemory("memory", "none is left here")
    ranks = disturbed(tmp_path, at(4, [rank], lambda: _fail(failure), hook))
    codes = ranks.codes()
    # Without torchrun the codes are gone with the first process.
    assert (codes[rank], codes[1 - rank]) == (8, 8 if rank else 1), ranks.text()
    assert ranks.errors() == ["error: memory: none is left here"]
    assert "error: " in ranks.processes[rank].text()


def test_a_failure_of_all_processes_is_said_once(tmp_path: Path) -> None:
    ranks = disturbed(tmp_path, at(2, [0, 1], lambda: _fail(ValueError("nobody can do that"))))
    assert ranks.codes() == [1, 1], ranks.text()
    (line,) = ranks.errors()
    assert line == "error: internal: ValueError: nobody can do that; please report it"
    assert ranks.text().count("Traceback") == 1


@pytest.mark.parametrize(
    ("override", "code", "line"),
    [
        ("attn=nope", 2, "error: attn: 'nope' is unknown"),
        ("accumulate=8", 2, "error: batch_size: 8 sequences do not share evenly among 2 processes"),
        ("model.num_heads=3", 2, "error: model.num_heads: num_heads=3 must divide"),
        ("data.path=gone.txt", 3, "error: data.path: gone.txt does not exist"),
        ("trainer=cpu", 2, "error: trainer.devices: is 1, but 2 processes have been started"),
        ("trainer.num_nodes=2", 2, "error: trainer.num_nodes: is 2, but the processes run on 1"),
        ("hydra.run.dir=taken", 6, "error: hydra.run.dir: taken already holds a run"),
    ],
)
def test_a_mistake_is_said_once(override: str, code: int, line: str, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "config.yaml").touch()
    ranks = disturbed(tmp_path, lambda rank: None, override)
    assert ranks.codes() == [code, code], ranks.text()
    (said,) = ranks.errors()
    assert said.startswith(line)
    assert not (tmp_path / "run").exists()


def test_a_mistake_of_one_machine_is_said_by_its_process(tmp_path: Path) -> None:
    def inside(rank: int) -> None:
        if rank == 1:
            TokenData.facts = lambda self: {}  # type: ignore[method-assign]
            os.environ["XDG_CACHE_HOME"] = "/dev/null"
            os.chdir(os.devnull.rpartition("/")[0])  # where text.txt is not

    folder = tmp_path / "here"
    arguments = [a for a in tiny(folder, *SHARED) if not a.startswith("data.path=")]
    ranks = Ranks(folder, *arguments, "data.path=text.txt", inside=inside)
    assert ranks.codes() == [3, 3], ranks.text()
    assert ranks.errors() == [
        "error: data.path: text.txt does not exist; give a UTF-8 text file or a folder"
    ]
    assert ranks.processes[1].text().startswith("error: ")


def test_a_machine_with_another_text_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "text.txt").write_text("Another text altogether.\n" * 50, encoding="utf-8")
    folder = tmp_path / "here"
    arguments = [a for a in tiny(folder, *SHARED) if not a.startswith("data.path=")]
    ranks = Ranks(
        folder, *arguments, "data.path=text.txt", inside=lambda rank: rank and os.chdir(other)
    )
    assert ranks.codes() == [2, 2], ranks.text()
    (line,) = ranks.errors()
    assert line.startswith("error: trainer.num_nodes: ")
    assert "is not like the first machine: another text" in line
    assert not (folder / "run").exists()


def test_a_mistake_of_a_process_that_never_comes_ends_those_that_wait(tmp_path: Path) -> None:
    def inside(rank: int) -> None:
        gptattn.machine.world.PARTING = datetime.timedelta(seconds=0.3)
        sys.argv += ["attn=nope"] * rank

    ranks = disturbed(tmp_path, inside)
    assert ranks.codes() == [2, 2], ranks.text()
    assert [line[:30] for line in ranks.errors()] == ["error: attn: 'nope' is unknown"]


def test_a_sweep_is_refused_under_torchrun(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, "-m", *tiny(tmp_path, *SHARED), "seed=1,2")
    assert ranks.codes() == [2, 2], ranks.text()
    (line,) = ranks.errors()
    assert line.startswith("error: command line: -m makes its runs in processes of its own")


def test_rows_end_with_the_step_that_was_saved(tmp_path: Path) -> None:
    ranks = disturbed(tmp_path, at(2, [1], lambda: signal.raise_signal(signal.SIGINT)))
    assert ranks.codes() == [130, 130], ranks.text()
    assert ranks.text().count("interrupted\n") == 1
    assert rows(tmp_path / "run")[-1]["step"] <= 3
