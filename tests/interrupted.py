"""Tiny runs that stop, or die, at a chosen moment."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from support import tiny
from torture import fingerprint

from gptattn.runs.folder import RunFolder
from gptattn.training.module import LanguageModel

__all__ = ["fingerprint"]

# Validations come after steps 2, 4 and 6, and log_every is 3: mostly at different steps.
SIX = (
    "budget.steps=6",
    "validation.count=3",
    "log_every=3",
    "accumulate=2",
    "model.dropout=0.2",
    "model.num_layers=2",  # what passes between layers needs two
    "run_dir=run",
)


def begun(folder: Path, *overrides: str) -> list[str]:
    return tiny(folder, *SIX, *overrides)


def once(
    monkeypatch: pytest.MonkeyPatch, method: str, step: int, act: Callable[..., object]
) -> None:
    """Call `act(module)` once, when the method is first entered after `step` optimizer steps."""
    original, left = getattr(LanguageModel, method), [act]

    def wrapped(self: LanguageModel, *args: Any) -> Any:
        if self.global_step == step and left:
            left.pop()(self)
        return original(self, *args)

    monkeypatch.setattr(LanguageModel, method, wrapped)


def crash(_: LanguageModel) -> NoReturn:
    raise AssertionError("the run dies here")


def sent(number: int) -> Callable[..., None]:
    return lambda _: signal.raise_signal(number)


def steps_kept(run: Path) -> list[str]:
    return [path.name for path in RunFolder(run).known_checkpoints()]


def content(folder: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}
