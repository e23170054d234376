"""What a run does for a GPU, tested without one."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from building import build_gpt, settings
from interrupted import begun, crash, once, steps_kept
from support import command, series, summary, train

from gptattn.model.gpt import GPT
from gptattn.settings.identity import meaning
from gptattn.training.module import LanguageModel


def test_the_losses_of_a_resumed_run_are_where_the_model_is() -> None:
    cfg = settings("model.num_layers=1")
    module = LanguageModel(
        build_gpt("model.num_layers=1"),
        cfg.optim,
        lambda step: 0.0,
        accumulate=1,
        loss_chunk_tokens=None,
        val_bytes=1,
    )
    module.train_losses[:] = [torch.tensor(2.0), torch.tensor(3.0)]  # as a checkpoint has them
    module.to("meta")
    module.on_train_start()
    here = torch.zeros((), device="meta")  # the loss of the first new step
    assert torch.stack([*module.train_losses, here]).device.type == "meta"
    assert module.grad_norm.device.type == "meta"


def test_after_an_overflow_in_float16_the_norm_is_null_and_the_run_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    before_step = LanguageModel.on_before_optimizer_step

    def overflowed(self: LanguageModel, optimizer: torch.optim.Optimizer) -> None:
        before_step(self, optimizer)
        if self.global_step == 3:  # the loss scaler's last step before the checkpoint
            self.grad_norm = torch.tensor(float("inf"))

    monkeypatch.setattr(LanguageModel, "on_before_optimizer_step", overflowed)
    with pytest.MonkeyPatch.context() as patch:
        once(patch, "training_step", 5, crash)
        assert command(tmp_path, *begun(tmp_path)) == 1
    run = tmp_path / "run"
    norms = dict(series(run, "train/grad_norm"))
    assert norms[4] is None
    assert norms[3] > 0
    json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    capfd.readouterr()
    assert command(tmp_path, "resume=run") == 0
    assert "warning" not in capfd.readouterr().err
    assert summary(run)["steps"] == 6


@pytest.mark.parametrize("asked", [None, "high", "medium"])
def test_the_precision_of_float32_products_is_that_of_the_run_and_then_as_before(
    asked: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", seen.append)
    given = [] if asked is None else [f"trainer.matmul_precision={asked}"]
    train(tmp_path, "budget.steps=1", "sample.tokens=0", *given)
    assert seen == [asked or "highest", "highest"]


def test_a_gpu_trains_in_half_precision_and_older_records_did_not() -> None:
    gpu, older = settings("trainer=gpu"), settings()
    assert (gpu.trainer.precision, gpu.trainer.matmul_precision) == ("bf16-mixed", "high")
    assert older.trainer.matmul_precision == "highest"
    assert meaning("trainer.matmul_precision").result
    assert not meaning("trainer.deterministic").result


def on_device(patch: pytest.MonkeyPatch) -> None:
    """Let runs on this CPU guard their steps as on a GPU."""
    init = LanguageModel.__init__

    def late(self: LanguageModel, *args: Any, **options: Any) -> None:
        init(self, *args, **options | {"on_device": True})

    patch.setattr(LanguageModel, "__init__", late)


def test_a_run_that_guards_its_steps_on_the_device_has_the_same_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clipped = "optim.grad_clip=0.5"
    known = [value for _, value in series(train(tmp_path / "host", clipped), "train/loss")]
    on_device(monkeypatch)
    found = [value for _, value in series(train(tmp_path / "device", clipped), "train/loss")]
    assert found == pytest.approx(known, rel=1e-6)


@pytest.mark.parametrize("every", [1, 100])
def test_on_the_device_a_nan_reaches_no_row_and_no_checkpoint_and_its_step_is_named(
    every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    on_device(monkeypatch)
    loss = GPT.loss
    calls = 0

    def poisoned(self: GPT, *args: Any, **named: Any) -> torch.Tensor:
        nonlocal calls
        calls += torch.is_grad_enabled()
        return loss(self, *args, **named) * (float("nan") if calls == 4 else 1.0)

    monkeypatch.setattr(GPT, "loss", poisoned)
    assert command(tmp_path, *begun(tmp_path, f"log_every={every}", "accumulate=1")) == 5
    assert "error: train/loss: is nan at step 4; try " in capfd.readouterr().err
    run = tmp_path / "run"
    assert steps_kept(run) == ["step=2.safetensors"]
    assert max(step for step, _ in series(run, "train/loss")) == (3 if every == 1 else 2)
