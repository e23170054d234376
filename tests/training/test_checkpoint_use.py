"""A run's checkpoint gives a fresh model the same loss, and training resumes from it."""

from pathlib import Path

import lightning.pytorch as L
import numpy as np
import pytest
import torch
import yaml
from support import check_job, summary, tiny
from torch.nn.functional import cross_entropy

from gptattn.data.sampler import ValidationSet
from gptattn.data.tokens import TokenData
from gptattn.model.gpt import GPT
from gptattn.runs.checkpoint import read_checkpoint
from gptattn.runs.folder import RunFolder
from gptattn.settings.build import build_data, build_model
from gptattn.training.checkpoints import SafeCheckpointIO
from gptattn.training.datamodule import RunDataModule
from gptattn.training.module import LanguageModel


def rebuilt(run: Path) -> tuple[GPT, np.ndarray]:
    """A new model with the run's weights, and the run's validation tokens."""
    overrides = yaml.safe_load((run / ".hydra" / "overrides.yaml").read_text(encoding="utf-8"))
    cfg = check_job(overrides)
    data = build_data(cfg)
    assert isinstance(data, TokenData)
    torch.manual_seed(999)
    model = build_model(cfg, data.tokenizer.vocab_size)
    file = RunFolder(run).known_checkpoints()[0]
    model.load_state_dict(read_checkpoint(file)["weights"])
    return model.eval(), data.val[:]


def test_a_checkpoint_gives_a_fresh_model_the_same_validation_loss(run: Path) -> None:
    model, val = rebuilt(run)
    nats, count = 0.0, 0
    with torch.no_grad():
        for ids, targets in ValidationSet(val, batch_size=3, context_length=16):
            logits = model(ids).double()
            nats += cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").item()
            count += targets.numel()
    assert count == len(val) - 1
    assert nats / count == pytest.approx(summary(run)["metrics"]["val/loss"], abs=1e-5)


def test_a_checkpoint_holds_plain_values(run: Path) -> None:
    file = RunFolder(run).known_checkpoints()[0]
    checkpoint = read_checkpoint(file)
    assert checkpoint["global_step"] == 4
    assert checkpoint["optimizer"].keys() == checkpoint["weights"].keys()


def fit(
    folder: Path, steps: int, accumulate: int, resume: Path | None = None
) -> tuple[list[float], L.Trainer]:
    """Train up to step `steps` of 6; return the module's losses and the trainer."""
    cfg = check_job(tiny(folder, f"accumulate={accumulate}", "attn=gqa"))
    data = build_data(cfg)
    torch.manual_seed(1 if resume is None else 2)
    module = LanguageModel(
        build_model(cfg, 256),
        cfg.optim,
        lambda step: step / 6,
        accumulate=accumulate,
        loss_chunk_tokens=512,
        val_bytes=100,
    )
    datamodule = RunDataModule(data, seed=1, batch_size=4, val_batch_size=2, context_length=16)
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=steps,
        max_epochs=-1,
        val_check_interval=2,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        plugins=[SafeCheckpointIO()],
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=datamodule, ckpt_path=resume)
    return [loss.item() for loss in module.train_losses], trainer


# Lightning uses an API that torch has deprecated; a real run hides Lightning's warnings.
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec:FutureWarning")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("stop", [2, 3])
def test_a_resumed_run_goes_on_with_the_losses_of_one_that_never_stopped(
    stop: int, accumulate: int, tmp_path: Path
) -> None:
    whole, _ = fit(tmp_path, 6, accumulate)
    begun, trainer = fit(tmp_path, stop, accumulate)
    trainer.save_checkpoint(tmp_path / "stopped.ckpt")
    rest, _ = fit(tmp_path, 6, accumulate, resume=tmp_path / "stopped.ckpt")
    assert len(whole) == 6
    assert begun == whole[:stop]
    assert rest == whole  # the losses since the last row are in the checkpoint
