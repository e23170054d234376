"""The machine's device, threads, memory, compilers and speed."""

import contextlib
import ctypes
import os
import platform
import random
import re
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from gptattn import find_source_tree
from gptattn.errors import ConfigError
from gptattn.machine.cpus import usable_cpus
from gptattn.machine.source_code import version_of

DTYPES = {  # of matrix products, by trainer.precision
    "32-true": torch.float32,
    "64-true": torch.float64,
    "16-mixed": torch.float16,
    "bf16-mixed": torch.bfloat16,
    "bf16-true": torch.bfloat16,
}


def resolve_device(accelerator: str, field: str = "trainer") -> torch.device:
    """Return the device for `cpu`, `gpu` or `auto`.

    Raises ConfigError, naming the field, for `gpu` without a GPU.
    """
    # Not MPS, where torch computes causal attention wrongly: pytorch#195910.
    if accelerator != "cpu" and torch.cuda.is_available():
        return torch.device("cuda")
    if accelerator == "gpu":
        raise ConfigError(field, f"no GPU is visible to torch; use {field}=cpu")
    return torch.device("cpu")


def seed_everything(seed: int) -> None:
    """Seed like Lightning's function of this name, which takes seconds to import."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    os.environ["PL_GLOBAL_SEED"] = str(seed)  # with which DDP seeds its processes again


def keep_freed_memory() -> None:
    """Let glibc keep freed memory: page faults make small steps vary by a tenth."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library
        for option, size in ((-1, 2**31 - 1), (-3, 2**25)):  # M_TRIM_ and M_MMAP_THRESHOLD, largest
            ctypes.CDLL(None).mallopt(option, size)


def set_threads(threads: int | None) -> int:
    """Set torch's CPU threads, by default all CPUs this process may use; return the count."""
    count = usable_cpus() if threads is None else threads
    torch.set_num_threads(count)
    return count


def matmul_flops_per_second(device: torch.device, dtype: torch.dtype) -> float:
    """Measure this device's FLOP/s on a product of n x n matrices: the best of several.

    It does not count toward the peak of GPU memory. An MFU relative to this rate is right on any
    machine; one relative to a hard-coded peak is not.
    """
    gpu = device.type == "cuda"
    n = 8192 if gpu else 1024
    a = torch.randn(n, n, device=device, dtype=dtype)

    def multiply() -> float:
        start = time.perf_counter()
        torch.mm(a, a)
        synchronize(device)
        return time.perf_counter() - start

    multiply()  # warm up; a CPU that lacks bfloat16 takes seconds for each product
    begun, times = time.perf_counter(), [multiply()]
    while time.perf_counter() - begun < (0.5 if gpu else 0.1):  # a GPU raises its clock meanwhile
        times.append(multiply())
    if gpu:
        del a
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return 2 * n**3 / min(times)


def synchronize(device: torch.device) -> None:
    """Wait until the GPU has finished its work; on a CPU, do nothing."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def runs_ahead(device: torch.device) -> bool:
    """Whether the host continues while the device still has work queued."""
    return device.type != "cpu"


class Moment:
    """A point in a device's work: now, or on a GPU, when the work queued so far is done."""

    def __init__(self, device: torch.device) -> None:
        self._host, self._event = time.perf_counter(), None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    def seconds_since(self, other: "Moment") -> float:
        """Return the seconds from `other` to this; the host waits for a GPU to get here."""
        if self._event is None or other._event is None:
            return self._host - other._host
        self._event.synchronize()
        return other._event.elapsed_time(self._event) / 1e3


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peak of `peak_memory_mb`."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):  # the peak can be reset only on Linux
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM


def peak_memory_mb(device: torch.device) -> float | None:
    """Return the peak since the reset in MB (10^6 bytes): of GPU tensors, or of the process.

    On a CPU, None except on Linux.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    peak = _read_proc("self/status", "VmHWM")  # getrusage also counts the parent's
    return None if peak is None else int(peak.split()[0]) * 1024 / 1e6


def device_name(device: torch.device) -> str:
    """Return the name of the GPU or the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return _read_proc("cpuinfo", "model name") or platform.processor() or platform.machine()


def _read_proc(file: str, name: str) -> str | None:
    """Return the value of the first line `name: value` of a file in /proc; None without one."""
    with contextlib.suppress(OSError):
        for line in Path("/proc", file).read_text().splitlines():
            if line.startswith(name):
                return line.partition(":")[2].strip()
    return None


def missing_compiler(device: torch.device) -> str | None:
    """Return the compiler that torch.compile lacks for this device, `C++` or `C`; None: it has one.

    For a GPU, this is the one with which Triton builds each kernel's launcher.
    """
    if device.type == "cpu":
        named, others, language = "CXX", ("g++", "clang++"), "C++"
    else:
        named, others, language = "CC", ("gcc", "clang"), "C"
    exists = any(shutil.which(name) for name in (os.environ.get(named, others[0]), *others))
    return None if exists else language


@dataclass(frozen=True)
class Toolchain:
    """What this machine has to compile kernels for a GPU."""

    capability: tuple[int, int]  # (9, 0): Hopper
    missing: str  # what Triton's kernels lack, in words; "": nothing
    triton: tuple[int, ...]  # version
    fla: bool  # whether it is installed


def find_toolchain(device: torch.device) -> Toolchain:
    """Return this machine's toolchain for its GPU."""
    lacking, triton = missing_compiler(device), version_of("triton")
    missing = "there is no C compiler" * bool(lacking) if triton else "Triton is not installed"
    version = tuple(map(int, re.findall(r"\d+", triton or "")[:3]))
    capability = torch.cuda.get_device_capability(device)
    return Toolchain(capability, missing, version, version_of("fla") is not None)


def git_commit() -> str | None:
    """Return the commit of this source tree, `-dirty` if it has changes; None outside git."""
    here = find_source_tree()
    if here is None:  # an installed package may lie inside somebody else's repository
        return None
    command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=40"]
    quiet = subprocess.DEVNULL
    try:
        return subprocess.check_output(command, text=True, timeout=5, stderr=quiet).strip()
    except (OSError, subprocess.SubprocessError):
        return None
