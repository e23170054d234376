"""Initial weights shared by variants: each depends only on the seed and its name."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gptattn.errors import ConfigError

# Methods that fill a tensor with random numbers, and functions of nn.init that the mode sees before
# they call one.
DRAWS = {"normal_", "uniform_", "kaiming_uniform_"}


class DrawnByName(TorchFunctionMode):
    """Inside this context, each parameter of `model` is drawn from the seed and its name.

    If two variants draw a parameter of the same name in the same way, it then starts with the same
    values; if one matrix has fewer rows, the rows in common match. The seed comes from the last
    `torch.manual_seed`. What a mechanism draws in its constructor doesn't change.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = {_memory(parameter): name for name, parameter in model.named_parameters()}
        self._before = torch.get_rng_state()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func.__name__ in DRAWS:
            tensor = args[0] if args else kwargs["tensor"]  # nn.init gives it by name
            if (name := self._names.get(_memory(tensor))) is not None:
                # A mechanism can draw a parameter in parts, each through a view.
                source = f"{torch.initial_seed()} {name} {tensor.storage_offset()}"
                # torch's CPU generator uses only the low 32 bits of a seed.
                key = int(hashlib.sha256(source.encode()).hexdigest()[:8], 16)
                kwargs["generator"] = torch.Generator(tensor.device).manual_seed(key)
        return func(*args, **kwargs)

    def check(self) -> None:
        """Raise ConfigError if torch's own generator was used."""
        if not torch.equal(self._before, torch.get_rng_state()):
            raise ConfigError(
                "shared_init",
                "works only if all layers draw their weights with normal_ or uniform_, but one of "
                "them doesn't; leave it out",
            )


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
