"""What the parts of the GPU benchmark share: sizes, settings without Hydra, and a clock."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from gptattn import source_tree
from gptattn.machine.device import matmul_flops_per_second, synchronize
from gptattn.model.gpt import GPT
from gptattn.settings.build import build_model
from gptattn.settings.config import TrainConfig, check
from gptattn.settings.values import build_dataclass

Cell = dict[str, Any]  # plain values, for JSON
CHOICES = {"position": "learned", "data": "pydocs", "tokenizer": "byte", "optim": "adamw"}


@dataclass(frozen=True)
class Lab:
    """The device and the sizes. `tiny`: sizes for a CPU, to see that everything runs."""

    device: torch.device
    tiny: bool

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def size(self, real: int, tiny: int) -> int:
        """Return one of the two numbers."""
        return tiny if self.tiny else real

    def settings(self, attn: str = "mha", **changes: Any) -> TrainConfig:
        """Return settings like those of `train.py`; `model__vocab_size=7` is model.vocab_size=7."""
        model = "tiny" if self.tiny else "gpt2_small"
        trainer = "gpu" if self.on_gpu else "cpu"
        chosen = {"attn": attn, "model": model, "block": "gpt2", **CHOICES}
        node = _yaml("train")
        del node["defaults"], node["hydra"]
        node |= {group: _yaml(f"{group}/{name}") for group, name in chosen.items()}
        node |= {"trainer": _yaml(f"trainer/{trainer}"), "choices": chosen}
        block = node["block"]  # sets two groups
        node |= {"block": block["block"], "model": node["model"] | block["model"]}
        if self.tiny:
            node["model"] |= {"num_layers": 2, "num_heads": 4, "d_model": 32, "context_length": 64}
        for name, value in changes.items():
            *groups, last = name.split("__")
            place = node
            for group in groups:
                place = place[group]
            place[last] = value
        cfg = build_dataclass(TrainConfig, node)
        check(cfg)
        return cfg

    def model(self, attn: str = "mha", vocab_size: int = 50304, **changes: Any) -> GPT:
        """Build a model of random weights, the same for equal arguments."""
        torch.manual_seed(0)
        cfg = self.settings(attn, **changes)
        return build_model(cfg, self.size(vocab_size, 64)).to(self.device)

    def compile(self, module: nn.Module) -> None:
        """Compile the module in place; with tiny sizes that would take most of the time."""
        if not self.tiny:
            module.compile()

    def rate(self, dtype: torch.dtype) -> float:
        """Measure the FLOP/s of products of this dtype; with tiny sizes, which tell nothing, 1."""
        return 1.0 if self.tiny else matmul_flops_per_second(self.device, dtype)

    @property
    def half(self) -> torch.dtype:
        return torch.bfloat16 if self.on_gpu else torch.float32

    def batch(self, rows: int, tokens: int, vocab_size: int) -> tuple[Tensor, Tensor]:
        """Return random ids and targets [rows, tokens] on the device."""
        ids = torch.randint(self.size(vocab_size, 64), (rows, tokens + 1), device=self.device)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def seconds(self, work: Callable[[], object], warm_up: int = 3, calls: int = 10) -> float:
        """Return the median seconds of a call after `warm_up` further ones."""
        if self.tiny:
            warm_up, calls = min(warm_up, 1), min(calls, 2)
        for _ in range(warm_up):
            work()
        synchronize(self.device)
        if self.on_gpu:
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
            marks[0].record()
            for mark in marks[1:]:
                work()
                mark.record()
            synchronize(self.device)
            return median(first.elapsed_time(last) for first, last in pairwise(marks)) / 1e3
        times = []
        for _ in range(calls):
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
        return median(times)

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """Return the most memory that a call adds to what is allocated; 0 on a CPU."""
        if not self.on_gpu:
            work()
            return 0
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        work()
        return torch.cuda.max_memory_allocated(self.device) - before


def _yaml(name: str) -> dict[str, Any]:
    folder = source_tree()
    assert folder is not None, "run it from a source tree"
    return yaml.safe_load((folder / "conf" / f"{name}.yaml").read_text(encoding="utf-8"))


def error_of(found: Tensor, right: Tensor) -> float:
    """Return the norm of the difference, relative to that of the right values."""
    right = right.double()
    return ((found.double() - right).norm() / right.norm().clamp_min(1e-30)).item()
