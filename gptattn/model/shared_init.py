"""Initial weights that variants have in common: each is drawn for its own name."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# Methods of tensors, and functions of nn.init, that fill a tensor with random numbers.
DRAWS = {
    *("normal_", "uniform_", "trunc_normal_"),
    *("xavier_normal_", "xavier_uniform_", "kaiming_normal_", "kaiming_uniform_"),
}


class DrawnByName(TorchFunctionMode):
    """Within it, each parameter of `model` is drawn from a generator keyed by seed and its name.

    A parameter that two variants have under one name, in one shape, then begins alike in both. The
    seed is that of the last `torch.manual_seed`. What a mechanism draws in its constructor is not
    changed.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = {_memory(parameter): name for name, parameter in model.named_parameters()}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func.__name__ in DRAWS and (name := self._names.get(_memory(args[0]))) is not None:
            # A mechanism may draw a parameter in parts, each through a view.
            key = _key(f"{torch.initial_seed()} {name} {args[0].storage_offset()}")
            kwargs["generator"] = torch.Generator(args[0].device).manual_seed(key)
        return func(*args, **kwargs)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _key(of: str) -> int:
    # All of it goes through the hash: of a seed, torch's generator on a CPU uses the low 32 bits.
    return int.from_bytes(hashlib.sha256(of.encode()).digest()[:4], "big")
