"""Tiny runs through the command line, in this process."""

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from building import settings as cached_settings

from gptattn.build.model import build_model
from gptattn.cli.train import main
from gptattn.data.tokenizer import ByteTokenizer
from gptattn.errors import UserError
from gptattn.machine.console import make_console
from gptattn.runs.load import save_model
from gptattn.settings.compose import settings
from gptattn.settings.config import TrainConfig
from gptattn.training.run import train as train_run

# Call(script name, *arguments) runs a script in this process: (exit code, stdout, stderr).
Call = Callable[..., tuple[int, str, str]]

# 2,064 bytes, some of them in characters of two and three bytes.
TEXT = "".join(f"Line {i:03d}: naïve π ≈ {i * 22 / 7:8.3f}. The end.\n" for i in range(48))

# A line whose characters take 1, 2, 3, 4 and 1 bytes in UTF-8.
MIXED = "Aé≈𝄞\n" * 20

# Hard cases for GPT-2's splitting into words: contractions, all kinds of spaces, digits, emoji.
TRICKY = (
    "It's we'll THEY'RE  a   b\n\n\n c\t\t d \r\n 🤗🏳️\u200d🌈 12345 3.14 ½ ²naïve 日本語　テスト"
    "\u00a0x\u2028y\x1cz\x85 ''s'd \ufeff\x00 e\u0301 \u180e f  "
)

TINY = (
    "model.d_model=16",
    "model.num_heads=4",
    "model.num_layers=1",
    "model.context_length=16",
    "batch_size=4",
    "budget.steps=4",
    "log_every=1",
    "validation.count=2",
    "sample.tokens=4",
    "trainer=cpu",
    "trainer.threads=1",
)


def bpe(folder: Path, vocab_size: int = 400) -> Path:
    """Train a byte-level BPE like GPT-2's with the library `tokenizers`; return its folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT, TRICKY * 3], trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer.model.save(str(folder))
    return folder


def tiny(folder: Path, *overrides: str) -> list[str]:
    """The overrides of a tiny run whose text and cache lie in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    text = folder / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    named = any(override.startswith("data=") for override in overrides)
    own = [] if named else ["data=text", f"data.path={text}"]
    return [*TINY, f"cache_dir={folder / 'cache'}", *own, *overrides]


def is_complaint(err: str, said: str) -> bool:
    """Whether stderr is one line, an error of this field with these words: "field: words"."""
    field, _, words = said.partition(": ")
    (line,) = err.splitlines()
    return line.startswith(f"error: {field}: ") and words in line


@contextlib.contextmanager
def refuses(said: str, code: int = 2) -> Iterator[None]:
    """Expect a UserError in one line: its field, its exit code, and words that tell what it means.

    `said` is "field: words"; "*: words" for a field that a test need not know.
    """
    field, _, words = said.partition(": ")
    with pytest.raises(UserError) as caught:
        yield
    error = caught.value
    assert field in (error.field, "*"), error
    assert error.exit_code == code, error
    assert words in error.message, error
    assert "\n" not in str(error)


@contextlib.contextmanager
def process_state() -> Iterator[None]:
    """Restore what a run changes in its process: handlers, threads, argv and environment."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in numbers}
    threads, argv = torch.get_num_threads(), sys.argv
    with mock.patch.dict(os.environ):
        try:
            yield
        finally:
            sys.argv = argv
            torch.set_num_threads(threads)
            for number, handler in handlers.items():
                signal.signal(number, handler)


def command(folder: Path, *arguments: str) -> int:
    """Run `gptattn-train ARGUMENTS` in `folder`, in this process; return its exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    with process_state(), contextlib.chdir(folder):
        sys.argv = ["gptattn-train", *arguments]
        with pytest.raises(SystemExit) as ended:
            main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def check_job(overrides: Sequence[str]) -> TrainConfig:
    """The settings of a run that has passed all checks, its match applied. Raises a UserError."""
    from gptattn.training.preflight import preflight

    return preflight(settings(overrides)).cfg


def train(folder: Path, *overrides: str) -> Path:
    """Train one tiny run in an empty folder, without the command line; return its run folder."""
    given = tiny(folder, *overrides)
    place = next((o.partition("=")[2] for o in given if o.startswith("run_dir=")), None)
    cfg = cached_settings(*(o for o in given if not o.startswith("run_dir=")))
    with process_state(), contextlib.chdir(folder):
        train_run(cfg, place, make_console(), overrides=given)
    (run,) = run_folders(folder)
    return run


def save_untrained(folder: Path, *overrides: str) -> Path:
    """Write a tiny model that was not trained, as a conversion does; return its folder."""
    cfg = check_job(tiny(folder, *overrides))
    save_model(folder / "model", cfg, build_model(cfg, 256), ByteTokenizer())
    return folder / "model"


def run_folders(folder: Path) -> list[Path]:
    """The folders of finished runs below `folder`."""
    return sorted(file.parent for file in folder.rglob("summary.json"))


def rows(run: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl; raises ValueError for NaN and Infinity, which are not JSON."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line, parse_constant=_no_json) for line in lines]


def series(run: Path, name: str) -> list[tuple[int, Any]]:
    """(step, value) of one metric, in the order of the file."""
    return [(row["step"], row[name]) for row in rows(run) if name in row]


def summary(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text(encoding="utf-8"), parse_constant=_no_json)


def losses(run: Path) -> list[tuple[int, Any]]:
    """(step, loss) of training, then of validation."""
    return series(run, "train/loss") + series(run, "val/loss")


def config(run: Path) -> dict[str, Any]:
    return yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))


def _no_json(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
