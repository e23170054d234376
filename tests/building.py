"""The menu read from `conf/`, small modules built from it, and what their tests look at.

Nothing here names a variant: a new file in `conf/attn` or `conf/position` is tested as it is.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gptattn.attention import Attention
from gptattn.cli.compose import CONF, composed, to_train_config
from gptattn.model.gpt import GPT
from gptattn.settings.build import build_model, construct, shared_arguments
from gptattn.settings.config import TrainConfig


def menu(group: str) -> list[str]:
    """The names of the files in one folder of `conf/`."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


# Six heads, so that there are groups of two and of three; heads of 5, a prime; a context of 11.
SMALL = (
    "model.num_layers=2",
    "model.num_heads=6",
    "model.d_model=30",
    "model.context_length=11",
    "model.dropout=0.0",
    "model.qkv_bias=true",
)


@lru_cache
def settings(*overrides: str) -> TrainConfig:
    """The settings of this command line: not to be changed, as others get the same object."""
    with composed(overrides) as cfg:
        return to_train_config(cfg)


def build_attention(variant: str, **overrides: Any) -> Attention:
    """One layer of a variant, by its YAML, at the small sizes; no position encoding.

    An override replaces an argument of the constructor, whether shared by all or the YAML's own.
    """
    cfg = settings(f"attn={variant}", *SMALL)
    shared = shared_arguments(cfg.model) | {"position": None, "layer": 0}
    spec = dict(cfg.attn)
    for name, value in overrides.items():
        (shared if name in shared else spec)[name] = value
    return construct("attn", spec, shared, [])


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
