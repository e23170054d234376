"""How a run computes: its threads, the precision of its products, algorithms that repeat."""

import contextlib
import os
import re
from collections.abc import Iterator

import torch

from gptattn.errors import ConfigError
from gptattn.machine.device import set_threads


@contextlib.contextmanager
def computing(
    threads: int | None, precision: str, deterministic: bool, device: torch.device
) -> Iterator[int]:
    """Compute as these settings say in this block; yields the number of threads.

    `threads` is as in `set_threads`, and stays after the block; `precision` is as in
    `matmul_precision`, and `deterministic` as in `repeatable`.
    """
    with matmul_precision(precision), repeatable(deterministic, device):
        yield set_threads(threads)


@contextlib.contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """In this block, multiply float32 matrices in the precision `highest`, `high` or `medium`."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def repeatable(on: bool, device: torch.device) -> Iterator[None]:
    """In this block, if `on`, let a GPU use only algorithms that repeat each bit of a result.

    A CPU does so anyway. Raises ConfigError for an operation that has no such algorithm.
    """
    if not on or device.type == "cpu":
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Filling memory before it is used is for debugging, and takes time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    try:
        yield
    except RuntimeError as error:
        operation = re.match(r"(\S+) does not have a deterministic implementation", str(error))
        if operation is None:
            raise
        raise ConfigError(
            "trainer.deterministic",
            f"torch's {operation[1]} has no deterministic algorithm on this device; "
            "use trainer.deterministic=false",
        ) from error
    finally:
        torch.use_deterministic_algorithms(False)
