"""A run with a trained BPE keeps it: without the cache, all that follows works from the run."""

import math
import shutil
from pathlib import Path

import pytest
import tokenizers
import torch
from support import TEXT, check_job, command, config, losses, refuses, summary, tiny, train

from gptattn.data.bpe import FILES
from gptattn.runs.load import load_run, save_model

SIZE = 300
BPE = ("tokenizer=bpe", f"tokenizer.vocab_size={SIZE}")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps; tests that change its folder copy it."""
    return train(tmp_path_factory.mktemp("bpe"), *BPE)


def test_a_uniform_model_has_the_bits_of_its_tokens_over_the_bytes_of_the_text(trained, tmp_path):
    saved, size = load_run(trained), len(TEXT.encode())
    for parameter in saved.model.parameters():
        torch.nn.init.zeros_(parameter)
    save_model(tmp_path / "zeros", saved.cfg, saved.model, saved.tokenizer)
    zeros = f"init_from={tmp_path / 'zeros'}"
    found = summary(train(tmp_path / "uniform", *BPE, zeros, "budget.steps=0"))
    data = found["data"]
    assert (data["tokenizer"], data["vocab_size"]) == ("bpe", SIZE)
    assert data["val_bytes"] == round(0.1 * size) > data["val_tokens"] / 0.8
    expected = math.log2(data["vocab_size"]) * data["val_tokens"] / data["val_bytes"]
    assert found["metrics"]["val/bits_per_byte"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_it_resumes_with_its_own_copy(trained, tmp_path, monkeypatch):
    run = Path(shutil.copytree(trained, tmp_path / "copy"))
    assert (run / "tokenizer" / FILES[0]).is_file()
    file, recorded = run / "config.yaml", config(run)
    assert (recorded["tokenizer"]["vocab_size"], recorded["tokenizer"]["path"]) == (SIZE, None)
    file.write_text(file.read_text().replace(recorded["cache_dir"], str(tmp_path / "other")))
    monkeypatch.setattr(tokenizers.Tokenizer, "train_from_iterator", None)  # nothing is learned
    assert command(tmp_path, f"resume='{run}'", "budget.steps=8") == 0
    assert recorded["tokenizer"]["sha256"] == load_run(run).tokenizer.settings()["sha256"]
    assert losses(run)[-1][0] == 8


def test_weights_of_other_tokens_are_refused(trained, tmp_path):
    given = [*BPE, f"init_from={trained}"]
    check_job(tiny(tmp_path / "same", *given))  # the same text gives the same tokens
    text = tmp_path / "other.txt"
    text.write_text(TEXT.upper())
    with refuses(f"init_from: tokenizer.path={trained}"):
        check_job(tiny(tmp_path / "other", *given, "data=text", f"data.path={text}"))
