"""What is changed inside of a run: it dies, its numbers go bad, its data never come."""

import ctypes
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from gptattn.data.sampler import TrainingStream
from gptattn.machine.disk import Part
from gptattn.model.gpt import GPT
from gptattn.runs.folder import step_of
from gptattn.training.module import LanguageModel


def _replace(owner: Any, name: str, value: Any) -> None:
    setattr(owner, name, value)


class Moments:
    """Numbers the moments of one kind that a run passes, and kills it at one.

    Kinds: `write` (before, amid and after each piece of a checkpoint), `name` (before and after
    each fsync, rename and removal), `validation` (before and after each batch). `at` 0: it lives,
    and `passed` tells how many there were.
    """

    KINDS = ("write", "name", "validation")

    def __init__(self, kind: str, at: int = 0) -> None:
        self.kind, self.at = kind, at
        self._passed = multiprocessing.get_context("fork").Value("q", 0)

    @property
    def passed(self) -> int:
        return self._passed.value

    def _moment(self) -> None:
        self._passed.value += 1
        if self._passed.value == self.at:
            os.kill(os.getpid(), signal.SIGKILL)

    def __call__(self) -> None:
        if self.kind == "write":
            self._watch_writes()
        elif self.kind == "name":
            for owner, name in ((os, "fsync"), (Path, "replace"), (Path, "unlink")):
                self._watch(owner, name)
        else:
            self._watch(LanguageModel, "validation_step")

    def _watch(self, owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            self._moment()
            result = original(*args, **kwargs)
            self._moment()
            return result

        _replace(owner, name, watched)

    def _watch_writes(self) -> None:
        original = Part.write

        def watched(file: Part, data: Any) -> int:
            if step_of(file.path) < 0:  # no checkpoint
                return original(file, data)
            half = len(data) // 2
            self._moment()
            original(file, data[:half])
            file.flush()
            self._moment()
            original(file, data[half:])
            file.flush()
            self._moment()
            return len(data)

        _replace(Part, "write", watched)


class Poison:
    """Puts a number that is none into one step of a run, or into one of its validations."""

    PLACES = ("loss", "gradient", "weight", "validation")

    def __init__(self, place: str, value: float, step: int) -> None:
        self.place, self.value, self.step = place, value, step

    def __call__(self) -> None:
        getattr(self, f"_{self.place}")()

    def _loss(self) -> None:
        original, place = GPT.loss, self
        training_step = LanguageModel.training_step

        def step(module: LanguageModel, *args: Any) -> None:
            def loss(model: GPT, *parts: Any, **how: Any) -> torch.Tensor:
                value = original(model, *parts, **how)
                return value * place.value if module.global_step + 1 >= place.step else value

            _replace(GPT, "loss", loss)
            training_step(module, *args)

        _replace(LanguageModel, "training_step", step)

    def _validation(self) -> None:
        original = LanguageModel.add_validation

        def poisoned(module: LanguageModel, *args: Any) -> None:
            original(module, *args)
            if module.global_step + 1 >= self.step:
                module._val_nats *= self.value

        _replace(LanguageModel, "add_validation", poisoned)

    def _gradient(self) -> None:
        original = LanguageModel.on_before_optimizer_step

        def poisoned(module: LanguageModel, optimizer: torch.optim.Optimizer) -> None:
            if module.global_step + 1 == self.step:
                gradient = next(module.model.parameters()).grad
                assert gradient is not None
                gradient.view(-1)[0] = self.value
            original(module, optimizer)

        _replace(LanguageModel, "on_before_optimizer_step", poisoned)

    def _weight(self) -> None:
        original = LanguageModel.training_step

        def poisoned(module: LanguageModel, *args: Any) -> None:
            original(module, *args)
            if module.global_step == self.step:
                # The final norm's gain: every token passes it.
                parameter = list(module.model.parameters())[-1]
                with torch.no_grad():
                    parameter.view(-1)[0] = self.value

        _replace(LanguageModel, "training_step", poisoned)


class Stall:
    """Makes a run wait for ever: for a batch, for one with the interpreter locked, or in one."""

    PLACES = ("data", "locked data", "validation")

    def __init__(self, place: str, step: int) -> None:
        self.place, self.step = place, step

    def __call__(self) -> None:
        if self.place == "validation":
            original_step = LanguageModel.validation_step

            def stalled(module: LanguageModel, *args: Any) -> None:
                time.sleep(3600)
                original_step(module, *args)

            _replace(LanguageModel, "validation_step", stalled)
            return
        original = TrainingStream.__iter__

        def batches(stream: TrainingStream) -> Iterator[Any]:
            for i, batch in enumerate(original(stream), stream.first_step + 1):
                if i == self.step and self.place == "data":
                    time.sleep(3600)
                elif i == self.step:
                    # PyDLL keeps the lock, as a page of a mapped file that does not come does.
                    ctypes.PyDLL(None).sleep(3600)
                yield batch

        _replace(TrainingStream, "__iter__", batches)
