"""What a run does for a GPU, tested without one."""

import json
from pathlib import Path

import pytest
import torch
from building import build_gpt, settings
from interrupted import begun, crash, once
from support import command, series, summary, train

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
def test_the_precision_of_float32_products_is_that_of_the_run(
    asked: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", seen.append)
    given = [] if asked is None else [f"trainer.matmul_precision={asked}"]
    train(tmp_path, "budget.steps=1", "sample.tokens=0", *given)
    assert seen == [asked or "highest"]


def test_a_gpu_trains_in_half_precision_and_older_records_did_not() -> None:
    gpu, older = settings("trainer=gpu"), settings()
    assert (gpu.trainer.precision, gpu.trainer.matmul_precision) == ("bf16-mixed", "high")
    assert older.trainer.matmul_precision == "highest"
    assert meaning("trainer.matmul_precision").result
    assert not meaning("trainer.deterministic").result
