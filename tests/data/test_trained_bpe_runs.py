"""A run with a trained BPE keeps it: without the cache, all that follows works from the run."""

import shutil
from pathlib import Path

import pytest
import tokenizers
from support import TEXT, check_job, command, config, losses, refuses, tiny, train

from gptattn.data.bpe import FILE
from gptattn.runs.load import load_run

SIZE = 300
BPE = ("tokenizer=bpe", f"tokenizer.vocab_size={SIZE}")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps; tests that change its folder copy it."""
    return train(tmp_path_factory.mktemp("bpe"), *BPE)


@pytest.mark.slow
def test_it_resumes_with_its_own_copy(trained, tmp_path, monkeypatch):
    run = Path(shutil.copytree(trained, tmp_path / "copy"))
    assert (run / "tokenizer" / FILE).is_file()
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
