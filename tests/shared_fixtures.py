"""Shared fixtures: a fixed seed, the variants and positions in `conf/`, scripts, and runs."""

import importlib
import os
import pickle
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import fla_kernels
import pytest
import torch
from building import menu
from interrupted import SIX, begun, fingerprint, once, sent
from omegaconf import OmegaConf
from support import Call, bpe, command, train
from torch import Tensor

from gptattn.attention.recurrence import load_fla


def parse_once() -> Callable[[str | Path | IO[str]], Any]:
    """`OmegaConf.load`, which parses no text twice: that is a third of the time of composing."""
    parsed: dict[str, bytes] = {}
    load = OmegaConf.load

    def load_yaml(file: str | Path | IO[str]) -> Any:
        opened = not isinstance(file, str | Path)
        text = file.read() if opened else Path(file).read_text(encoding="utf-8")
        if text not in parsed:
            if opened:
                file.seek(0)
            parsed[text] = pickle.dumps(load(file))
        return pickle.loads(parsed[text])

    return load_yaml


@pytest.fixture(scope="session", autouse=True)
def _fast() -> Iterator[None]:
    """Runs do not wait for the disk, as no test cuts the power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OmegaConf, "load", parse_once())
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def small_files_only() -> Iterator[None]:
    """A limit of the system of 2,000 bytes, at which writes fail as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots are made and written, but matplotlib draws nothing into them, which takes longest."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    def empty(canvas: FigureCanvasSVG, file: IO[str], **_: object) -> None:
        file.write('<svg viewBox="0 0 1 1"></svg>')

    monkeypatch.setattr(FigureCanvasSVG, "print_svg", empty)
    monkeypatch.setattr(FigureCanvasAgg, "print_png", lambda *_, **__: None)


@pytest.fixture(params=menu("attn"))
def variant(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    """Run the command of a script in this process: its exit code, stdout and stderr."""

    def run(name: str, *arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")  # or generate.py sets it to 1 for all tests
        code = importlib.import_module(f"gptattn.cli.commands.{name}").main()
        return code, *capfd.readouterr()

    return run


@pytest.fixture(scope="session")
def gpt2_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of a tokenizer like GPT-2's. Not to be changed."""
    return bpe(tmp_path_factory.mktemp("bpe"))


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny run with two layers of a variant. Tests share it: do not modify the folders."""
    base = tmp_path_factory.mktemp("variants")

    @cache
    def run_of(variant: str) -> Path:
        return train(base / variant, f"attn={variant}", "model.num_layers=2")

    return run_of


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A run of a variant with the settings of interrupted.SIX. Not to be changed."""
    return cache(lambda variant: train(tmp_path_factory.mktemp(variant), *SIX, f"attn={variant}"))


@pytest.fixture
def whole(undisturbed: Callable[[str], Path]) -> Callable[[str], str]:
    """The fingerprint of an undisturbed run of a variant."""
    return lambda variant: fingerprint(undisturbed(variant))


@pytest.fixture
def finished(undisturbed: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of the undisturbed run of mha, in `run`."""
    return Path(shutil.copytree(undisturbed("mha"), tmp_path / "run"))


@pytest.fixture(scope="session")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The parent folder of a run that got SIGTERM in its third step, and saved after it."""
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.MonkeyPatch.context() as patch:
        once(patch, "training_step", 2, sent(signal.SIGTERM))
        assert command(folder, *begun(folder)) == 143
    return folder


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor | None]]:
    """A package of this name, with `fla_kernels` in place of its own; gives their `cu_seqlens`.

    As in fla, torch.compile leaves them alone.
    """
    seen: list[Tensor | None] = []

    def run(name: str, **given: Any) -> tuple[Tensor, Tensor]:
        seen.append(given.get("cu_seqlens"))
        return fla_kernels.kernel(name, **given)

    found: dict[str, dict[str, Any]] = {"fla": {}, "fla.ops": {}} | {
        f"fla.ops.{name}": {f"chunk_{name}": torch.compiler.disable(partial(run, name))}
        for name in ("simple_gla", "gated_delta_rule", "kda")
    }
    for name, members in found.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)
    load_fla.cache_clear()
    yield seen
    load_fla.cache_clear()
