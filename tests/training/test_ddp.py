"""A run of several processes is the run of one process, and is recorded once."""

import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gptattn.machine.place import Place
from gptattn.machine.world import ALONE, World
from ranks import SHARED, Ranks, resumed, trained
from support import TEXT, config, losses, rows, summary, tiny
from tortures.bench import fingerprint

import gptattn.data.task_data
import gptattn.training.run
from gptattn.data.sampler import rows_of
from gptattn.data.task_data import TaskData
from gptattn.data.tasks import Recall, Rows
from gptattn.data.tokenizer import TaskIds
from gptattn.data.tokens import TokenData
from gptattn.model.loss import IGNORED
from gptattn.runs.checkpoint import choose_checkpoint, write_checkpoint
from gptattn.runs.folder import RunFolder
from gptattn.runs.resume import start_at
from gptattn.training.module import LanguageModel

RECALL = (
    "data=recall",
    "data.vocab_size=40",
    "data.pairs=3",
    "data.val_rows=11",
    "sample.tokens=0",
)
DROPS = "model.dropout=0.2"


def weights(run: Path) -> dict[str, torch.Tensor]:
    return choose_checkpoint(RunFolder(run)).content["weights"]


def assert_alike(run: Path, other: Path) -> None:
    """Losses and weights are equal but for the order of sums."""
    for (step, loss), (same, expected) in zip(losses(run), losses(other), strict=True):
        assert step == same
        assert loss == pytest.approx(expected, rel=0, abs=1e-5)
    theirs = weights(other)
    for name, tensor in weights(run).items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=1e-5, msg=name)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run of one process."""
    return trained(tmp_path_factory.mktemp("one"), size=1)


def test_two_processes_make_the_losses_and_weights_of_one(one: Path, tmp_path: Path) -> None:
    assert_alike(trained(tmp_path), one)


@pytest.mark.parametrize(
    "overrides",
    [
        ("accumulate=1", "attn=cross_layer", "part=[value_residual]", "optim=muon"),
        (*RECALL, "optim.grad_clip=0.01", "trainer.precision=64-true"),
    ],
    ids=["shared layers", "task"],
)
def test_two_processes_make_the_run_of_one(overrides: tuple[str, ...], tmp_path: Path) -> None:
    two = trained(tmp_path / "two", *overrides)
    assert_alike(two, trained(tmp_path / "one", *overrides, size=1))


def test_a_loss_counts_by_its_scored_targets(tmp_path: Path) -> None:
    def uneven(rank: int) -> None:
        """Score one target of every other row, as a task whose rows differ would."""
        made = gptattn.data.task_data.task_rows

        def fewer(*arguments: Any) -> Rows:
            ids, targets = made(*arguments)
            for row in targets[::2]:
                row[np.flatnonzero(row != IGNORED)[1:]] = IGNORED
            return ids, targets

        gptattn.data.task_data.task_rows = fewer

    two = trained(tmp_path / "two", *RECALL, inside=uneven)
    assert_alike(two, trained(tmp_path / "one", *RECALL, size=1, inside=uneven))
    even = losses(trained(tmp_path / "even", *RECALL, size=1))
    assert [loss for _, loss in even] != pytest.approx([loss for _, loss in losses(two)])


def test_three_processes_share_a_validation_of_fewer_rows(tmp_path: Path) -> None:
    overrides = ("batch_size=6", "validation.fraction=0.02")  # 41 tokens: two rows and a bit
    three = trained(tmp_path / "three", *overrides, size=3)
    assert_alike(three, trained(tmp_path / "one", *overrides, size=1))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run of two processes, with dropout."""
    return trained(tmp_path_factory.mktemp("whole"), DROPS)


def test_rows_samples_and_summary_are_written_once(whole: Path, one: Path) -> None:
    kinds = [(row["step"], sorted(row.keys() - {"step", "time"})) for row in rows(whole)]
    assert kinds == [(row["step"], sorted(row.keys() - {"step", "time"})) for row in rows(one)]
    assert len(list(whole.glob("events.out.*"))) == 1
    assert summary(whole)["environment"]["processes"] == 2
    assert summary(one)["environment"]["processes"] == 1
    assert [config(whole)["trainer"][name] for name in ("devices", "num_nodes")] == [2, 1]
    names = [sorted(path.name for path in (run / "checkpoints").iterdir()) for run in (whole, one)]
    assert names[0] == names[1]


def test_only_the_first_process_prints(whole: Path) -> None:
    first, second = (whole.with_name(f"log{rank}").read_text() for rank in (0, 1))
    assert "val loss" in first
    assert second == ""


def test_processes_drop_by_masks_of_their_own_that_repeat(whole: Path, tmp_path: Path) -> None:
    assert fingerprint(trained(tmp_path, DROPS)) == fingerprint(whole)
    text = tiny(tmp_path / "same rows", *SHARED, DROPS, "budget.steps=1", "validation.count=1")
    seen = tmp_path / "seen"

    def same_rows(rank: int) -> None:
        """Give both processes the first one's rows, and note their losses before any update."""
        World.part = lambda self, rows: slice(0, rows)  # type: ignore[method-assign]
        World.mean = lambda self, value: _noted(seen, rank, value)  # type: ignore[method-assign]
        gptattn.training.run.rows_of = lambda *_: rows_of(8, 2, 0, 2)

    assert Ranks(tmp_path / "same rows", *text, inside=same_rows).codes() == [0, 0]
    first, second = (float((tmp_path / f"seen{rank}").read_text()) for rank in (0, 1))
    assert first != second


def _noted(file: Path, rank: int, value: torch.Tensor) -> torch.Tensor:
    file.with_name(f"{file.name}{rank}").write_text(str(value.item()))
    return value


def stopped_after(step: int, folder: Path, *overrides: str, size: int = 2) -> None:
    """A run that is asked to end in the step after `step`, by a signal to its last process."""
    ranks = Ranks(folder, *tiny(folder, *SHARED, *overrides), size=size, inside=_asked(step, size))
    assert ranks.codes() == [143] * size, ranks.text()


def _asked(step: int, size: int) -> Callable[[int], None]:
    def inside(rank: int) -> None:
        original = LanguageModel.training_step

        def wrapped(self: LanguageModel, *args: object) -> None:
            if self.global_step == step and rank == size - 1:
                signal.raise_signal(signal.SIGTERM)
            original(self, *args)  # type: ignore[arg-type]

        LanguageModel.training_step = wrapped  # type: ignore[method-assign,assignment]

    return inside


def test_a_stopped_run_resumes_bit_for_bit_with_as_many_processes(
    whole: Path, tmp_path: Path
) -> None:
    stopped_after(2, tmp_path, DROPS)
    ranks = resumed(tmp_path, "trainer=ddp", "trainer.accelerator=cpu")
    assert "warning" not in ranks.text()
    assert fingerprint(tmp_path / "run") == fingerprint(whole)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_run_resumes_with_another_number_of_processes(
    before: int, after: int, one: Path, tmp_path: Path
) -> None:
    stopped_after(2, tmp_path / "changed", size=before)
    # More threads may be asked for now, but a fork would wait for those that OpenMP has started for
    # this process, and that it has not.
    changes = f"trainer.devices={after}", "trainer.threads=1"
    ranks = resumed(tmp_path / "changed", *changes, size=after)
    told = [line for line in ranks.text().splitlines() if line.startswith("warning: ")]
    assert len(told) == 1
    assert told[0].startswith("warning: trainer.devices: ")
    run = tmp_path / "changed" / "run"
    assert config(run)["trainer"]["devices"] == after
    assert_alike(run, one)


def test_a_resume_needs_as_many_processes_as_the_run_has_had_unless_it_is_said(
    whole: Path, tmp_path: Path
) -> None:
    ranks = Ranks(tmp_path, f"resume={whole}", size=3)
    assert ranks.codes() == [2] * 3
    assert ranks.errors() == [
        "error: trainer.devices: is 2, but 3 processes have been started on this machine; give "
        "trainer=ddp, or trainer.devices=3"
    ]


def test_a_checkpoint_without_a_number_of_processes_is_that_of_one(
    one: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(one, tmp_path / "run"))
    chosen = choose_checkpoint(RunFolder(run))
    del chosen.content["callbacks"]["Checkpoints"]["processes"]
    write_checkpoint(chosen.path, chosen.content)
    assert start_at(chosen.path).facts["processes"] == 1


def test_a_budget_in_seconds_ends_all_processes_after_the_same_step(tmp_path: Path) -> None:
    run = trained(tmp_path, "budget.steps=null", "budget.seconds=0.2", "validation.count=2")
    last = rows(run)[-1]["step"]
    assert summary(run)["steps"] == last >= 1
    validated = [row["step"] for row in rows(run) if "val/loss" in row]
    assert validated[-1] == last
    assert len(validated) in (1, 2, 3)


@pytest.mark.parametrize(("size", "accumulate"), [(1, 1), (2, 1), (2, 3), (3, 2)])
def test_processes_share_each_micro_batch_in_order(size: int, accumulate: int) -> None:
    parts = [rows_of(12, accumulate, rank, size) for rank in range(size)]
    micro = [part.reshape(accumulate, -1) for part in parts]
    for i, expected in enumerate(np.split(np.arange(12), accumulate)):
        assert [*np.concatenate([own[i] for own in micro])] == [*expected]


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 12])
def test_the_parts_of_a_validation_batch_are_its_rows_once(rows: int) -> None:
    worlds = [World(Place(rank, 3, rank, 3)) for rank in range(3)]
    assert [i for world in worlds for i in range(rows)[world.part(rows)]] == [*range(rows)]
    assert ALONE.part(rows) == slice(0, rows)


def test_rows_asked_for_are_those_of_the_whole_batch() -> None:
    tokens = np.frombuffer(TEXT.encode(), np.uint8).astype(np.uint16)
    text = TokenData(tokens, tokens, TaskIds(256), "", None)  # type: ignore[arg-type]
    task = TaskData(Recall(40, 10, 3), 16, TaskIds(40))
    for data in (text, task):
        mine = np.array([1, 5])
        whole, own = (data.training_batch(7, 3, 6, 16, rows) for rows in (None, mine))
        for part, expected in zip(own, whole, strict=True):
            assert part.equal(expected[mine])
