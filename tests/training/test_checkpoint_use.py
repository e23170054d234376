"""A run's checkpoint gives a fresh model the same loss."""

from pathlib import Path

import pytest
import torch
from support import summary
from torch.nn.functional import cross_entropy

from gptattn.data.sampler import ValidationSet
from gptattn.data.tokens import TokenData
from gptattn.runs.checkpoint import read_checkpoint
from gptattn.runs.folder import RunFolder
from gptattn.runs.load import load_run
from gptattn.settings.build import build_data


def test_a_checkpoint_gives_a_fresh_model_the_same_validation_loss(run: Path) -> None:
    saved = load_run(run)
    data = build_data(saved.cfg)
    assert isinstance(data, TokenData)
    val = data.val[:]
    nats, count = 0.0, 0
    with torch.no_grad():
        for ids, targets in ValidationSet(val, batch_size=3, context_length=16):
            logits = saved.model(ids).double()
            nats += cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").item()
            count += targets.numel()
    assert count == len(val) - 1
    assert nats / count == pytest.approx(summary(run)["metrics"]["val/loss"], abs=1e-5)


def test_a_checkpoint_holds_plain_values(run: Path) -> None:
    file = RunFolder(run).known_checkpoints()[0]
    checkpoint = read_checkpoint(file)
    assert checkpoint["global_step"] == 4
    count = len(checkpoint["state_dict"])
    assert len(checkpoint["optimizer_states"][0]["state"]) == count
