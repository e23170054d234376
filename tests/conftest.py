"""What the tests share: a fixed seed, the menu read from `conf/`, and small modules built from it.

Nothing here names a variant: a new file in `conf/attn` or `conf/position` is tested as it is.
"""

import importlib.util
import inspect
import signal
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from interrupted import SIX, begun, once, sent
from support import command, train
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tortures.bench import fingerprint

from gptattn.attention import Attention
from gptattn.cli.compose import CONF, composed, to_train_config
from gptattn.model.gpt import GPT
from gptattn.settings.build import build_model, construct, find_target, shared_arguments
from gptattn.settings.config import TrainConfig


def menu(group: str) -> list[str]:
    """The names of the files in one folder of `conf/`."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


# Mechanisms of tests/probes.py, by a YAML each; no user sees them.
PROBE_CONFIGS = Path(__file__).with_name("probe_configs")
PROBES = sorted(path.stem for path in (PROBE_CONFIGS / "attn").glob("*.yaml"))
WITH_PROBES = (f"hydra.searchpath=[file://{PROBE_CONFIGS}]", "allow_targets=[probes]")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=menu("attn"))
def variant(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=menu("position"))
def position(request: pytest.FixtureRequest) -> str:
    return request.param


# Six heads, so that there are groups of two and of three; heads of 5, a prime; a context of 11.
SMALL = (
    "model.num_layers=2",
    "model.num_heads=6",
    "model.d_model=30",
    "model.context_length=11",
    "model.dropout=0.0",
    "model.qkv_bias=true",
)


Call = Callable[..., tuple[int, str, str]]


def script(name: str) -> ModuleType:
    """A file of scripts/, as a module."""
    path = CONF.parent / "scripts" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"script_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded  # dataclasses look their module up
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    """Run a script in this process: its exit code, stdout and stderr."""

    def run(name: str, *arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")  # generate.py would leave it at 1
        code = script(name).main()
        return code, *capfd.readouterr()

    return run


@lru_cache
def settings(*overrides: str) -> TrainConfig:
    """The settings of this command line: not to be changed, as others get the same object."""
    probed = any(f"attn={name}" in overrides for name in PROBES)
    with composed([*overrides, *(WITH_PROBES if probed else ())]) as cfg:
        return to_train_config(cfg)


def build_attention(variant: str, **overrides: Any) -> Attention:
    """One layer of a variant, by its YAML, at the small sizes; no position encoding.

    An override replaces an argument of the constructor, whether shared by all or the YAML's own;
    a mechanism that has but one backend is built with that.
    """
    cfg = settings(f"attn={variant}", *SMALL)
    shared = shared_arguments(cfg.model) | {"position": None, "layer": 0, "backend": None}
    spec = dict(cfg.attn)
    for name, value in overrides.items():
        (spec if name in spec or name not in shared else shared)[name] = value
    return construct("attn", spec, shared, cfg.allow_targets)


def takes(variant: str, argument: str) -> bool:
    """Whether the mechanism has such an argument."""
    cfg = settings(f"attn={variant}", *SMALL)
    target = find_target("attn", cfg.attn, cfg.allow_targets)
    return argument in inspect.signature(target).parameters


def build_gpt(*overrides: str, vocab_size: int = 13, std: float | None = None) -> GPT:
    """The GPT of this command line, at the small sizes where it says nothing else.

    `std` adds N(0, std) to every parameter: biases and gains then take part as well.
    """
    model = build_model(settings(*SMALL, *overrides), vocab_size)
    if std is not None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=std)
    return model


def through_cache(
    step: Callable[[Tensor, Any], Tensor], x: Tensor, cache: Any, chunks: Sequence[int]
) -> Tensor:
    """The outputs of `step(chunk of x, cache)`, joined along the tokens."""
    assert sum(chunks) == x.shape[1]
    return torch.cat([step(part, cache) for part in x.split(list(chunks), dim=1)], dim=1)


class Allocations(TorchDispatchMode):
    """Notes the elements of every tensor with memory of its own that is made inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[int] = []
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {id_of_memory(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and id_of_memory(tensor) not in given:
                self.bytes += tensor.untyped_storage().nbytes()
                self.elements.append(tensor.untyped_storage().nbytes() // tensor.itemsize)
        return result


def id_of_memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The fingerprint of a run of the variant, of interrupted.SIX, that nothing has disturbed."""
    known: dict[str, str] = {}

    def of(variant: str) -> str:
        if variant not in known:
            folder = tmp_path_factory.mktemp(variant)
            known[variant] = fingerprint(train(folder, *SIX, f"attn={variant}"))
        return known[variant]

    return of


@pytest.fixture(scope="session")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home of a run of which the checkpoint after its second step is left."""
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.MonkeyPatch.context() as patch:
        once(patch, "training_step", 2, sent(signal.SIGTERM))
        assert command(folder, *begun(folder)) == 143
    return folder
