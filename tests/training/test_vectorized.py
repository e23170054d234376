"""Seeds trained as one model leave the folders that they would have left alone."""

import contextlib
import shutil
import signal
from collections.abc import Callable, Iterator
from math import nan
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as L
import pytest
import torch
from building import settings
from rich.console import Console
from support import command, config, losses, process_state, rows, series, summary, tiny, train

from gptattn.errors import NumericError
from gptattn.machine import arithmetic
from gptattn.machine.signals import Stopped
from gptattn.runs.checkpoint import choose_checkpoint
from gptattn.runs.folder import RunFolder
from gptattn.training.callbacks import MetricRows
from gptattn.training.module import LanguageModel
from gptattn.training.precheck import check_run
from gptattn.training.vectorized import train_seeds

OURS = ("attn=gqa", "model.num_layers=2", "budget.steps=7", "validation.count=3")
SEEDS = (3, 1)


def together(folder: Path, *overrides: str, seeds: tuple[int, ...] = SEEDS) -> dict[int, Path]:
    """Train these seeds as one model; return the run folder of each."""
    cfg = settings(*tiny(folder, *OURS, *overrides))
    folders = {seed: folder / f"s{seed}" for seed in seeds}
    with process_state():
        assert train_seeds(check_run(cfg), folders, Console(quiet=True)) == {}
    return folders


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    return together(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("alone"), *OURS, f"seed={SEEDS[1]}")


def test_each_seed_has_the_losses_and_samples_of_its_run_alone(
    pair: dict[int, Path], alone: Path
) -> None:
    ours, theirs = losses(pair[1]), losses(alone)
    assert [step for step, _ in ours] == [step for step, _ in theirs]
    assert [x for _, x in ours] == pytest.approx([x for _, x in theirs], rel=1e-5)
    assert series(pair[1], "sample/text") == series(alone, "sample/text")
    assert losses(pair[3]) != ours


def test_each_seed_has_the_record_of_a_run_alone(pair: dict[int, Path], alone: Path) -> None:
    found = [(row["step"], sorted(row.keys() - {"time"})) for row in rows(pair[1])]
    assert found == [(row["step"], sorted(row.keys() - {"time"})) for row in rows(alone)]
    own = ("cache_dir", "data", "experiment_name")
    assert {k: v for k, v in config(pair[1]).items() if k not in own} == {
        k: v for k, v in config(alone).items() if k not in own
    }
    assert RunFolder(pair[1]).read_making() == RunFolder(alone).read_making()
    ours, theirs = summary(pair[1]), summary(alone)
    assert ours.keys() == theirs.keys()
    assert ours["metrics"].keys() == theirs["metrics"].keys()
    files = {file.relative_to(alone).as_posix() for file in alone.rglob("*") if file.is_file()}
    plain = {name for name in files if not name.startswith((".", "events"))}
    assert plain <= {file.relative_to(pair[1]).as_posix() for file in pair[1].rglob("*")}


def test_runs_that_share_a_model_have_no_speed_and_no_memory_of_their_own(
    pair: dict[int, Path],
) -> None:
    metrics = summary(pair[1])["metrics"]
    shared = {name: value for name, value in metrics.items() if name.startswith("perf/")}
    assert len(shared) == 5
    assert set(shared.values()) == {None}
    assert {value for _, value in series(pair[1], "perf/tokens_per_s")} == {None}
    assert summary(pair[1])["shares"] == "model"


@pytest.mark.slow
def test_after_100_steps_each_seed_is_where_it_would_be_alone_with_its_own_clipping(
    tmp_path: Path,
) -> None:
    longer = ("budget.steps=100", "optim.grad_clip=0.7", "accumulate=2", "log_every=9")
    longer = (*longer, "model.num_layers=1", "sample.tokens=0", "validation.count=1")
    pair = together(tmp_path / "pair", *longer)
    theirs = train(tmp_path / "alone", *OURS, *longer, "seed=3")
    norms = [x for _, x in series(theirs, "train/grad_norm")]
    assert norms[0] > 0.7
    assert [x for _, x in series(pair[3], "train/grad_norm")] == pytest.approx(norms, rel=1e-3)
    expected = [x for _, x in losses(theirs)]
    assert [x for _, x in losses(pair[3])] == pytest.approx(expected, rel=1e-4)


def test_a_finished_seed_goes_on_alone_as_if_it_had_been_alone(
    pair: dict[int, Path], alone: Path, tmp_path: Path
) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for source, run in ((pair[1], ours), (alone, theirs)):
        shutil.copytree(source, run)
        assert command(tmp_path, f"resume={run}", "budget.steps=9", "validation.count=3") == 0
    assert [step for step, _ in losses(ours)] == [step for step, _ in losses(theirs)]
    expected = [x for _, x in losses(theirs)]
    assert [x for _, x in losses(ours)] == pytest.approx(expected, rel=1e-5)
    assert summary(ours)["metrics"]["perf/tokens_per_s"] is None


@contextlib.contextmanager
def after_step(step: int, seed: int, act: Callable[[LanguageModel], object]) -> Iterator[None]:
    """Act on the run of this seed, in the folder `s<seed>`, after this step."""
    log = MetricRows.on_train_batch_end

    def logged(self: MetricRows, trainer: L.Trainer, module: Any, *args: Any) -> None:
        log(self, trainer, module, *args)
        if self.recorder.version == f"s{seed}" and trainer.global_step == step:
            act(module)

    with mock.patch.object(MetricRows, "on_train_batch_end", logged):
        yield


def test_seeds_compute_as_their_settings_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []

    def noted(on: bool, _: torch.device) -> contextlib.nullcontext[None]:
        seen.append(on)
        return contextlib.nullcontext()

    monkeypatch.setattr(arithmetic, "repeatable", noted)
    how = ("trainer.matmul_precision=high", "trainer.deterministic=true", "sample.tokens=0")
    with after_step(1, 1, lambda _: seen.append(torch.get_float32_matmul_precision())):
        together(tmp_path, *how, "budget.steps=1", "validation.count=1")
    assert seen == [True, "high"]
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_seed_that_diverges_ends_alone(pair: dict[int, Path], tmp_path: Path) -> None:
    cfg = settings(*tiny(tmp_path, *OURS))
    folders = {seed: tmp_path / f"s{seed}" for seed in SEEDS}
    with process_state(), after_step(4, 3, lambda module: module.model.norm.weight.data.fill_(nan)):
        errors = train_seeds(check_run(cfg), folders, Console(quiet=True))
    assert list(errors) == [3]
    assert isinstance(errors[3], NumericError)
    assert "train/loss: is nan at step 5" in str(errors[3])
    assert not RunFolder(folders[3]).done
    expected = [x for _, x in losses(pair[1])]
    assert [x for _, x in losses(folders[1])] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_signal_saves_every_seed_and_each_goes_on_alone(
    seed: int, alone: Path, tmp_path: Path
) -> None:
    cfg = settings(*tiny(tmp_path, *OURS))
    folders = {seed: tmp_path / f"s{seed}" for seed in SEEDS}
    terminated = after_step(2, seed, lambda _: signal.raise_signal(signal.SIGTERM))
    with process_state(), terminated, pytest.raises(Stopped):
        train_seeds(check_run(cfg), folders, Console(quiet=True))
    for run in folders.values():
        content = choose_checkpoint(RunFolder(run)).content
        assert content["global_step"] == 2
    assert command(tmp_path, f"resume={folders[1]}") == 0
    assert summary(folders[1])["steps"] == 7
    expected = [x for _, x in losses(alone)]
    assert [x for _, x in losses(folders[1])] == pytest.approx(expected, rel=1e-5)
