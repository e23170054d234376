"""What this machine is and can do: device, threads, matmul rate, memory, names for the record."""

import contextlib
import os
import platform
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import torch

from gptattn import source_tree
from gptattn.errors import ConfigError
from gptattn.machine.cpus import usable_cpus

WARM_UP_SECONDS = 0.3  # of products, until an idle GPU has raised its clock


def resolve_device(accelerator: str, field: str = "trainer") -> torch.device:
    """Return the device for `cpu`, `gpu` or `auto`.

    Raises ConfigError, naming the field, for `gpu` without a GPU.
    """
    if accelerator == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda")
    if accelerator == "gpu":
        raise ConfigError(field, f"no GPU is visible to torch; use {field}=cpu")
    return torch.device("cpu")


def check_precision(precision: str, device: torch.device) -> None:
    """Raise ConfigError for float16 on a CPU, where Lightning silently uses bfloat16."""
    if precision == "16-mixed" and device.type == "cpu":
        raise ConfigError(
            "trainer.precision", "16-mixed needs a GPU; use bf16-mixed or 32-true on a CPU"
        )


def set_threads(threads: int | None) -> int:
    """Set torch's CPU threads, by default to the CPUs this process may use; return the count."""
    count = usable_cpus() if threads is None else threads
    torch.set_num_threads(count)
    return count


def use_huge_pages() -> None:
    """Make torch allocate large tensors in huge pages (Linux); call it before the first tensor.

    Decoding reads all weights for every token, and with pages of 4 KiB it waits for the page table:
    huge pages make decoding with GPT-2 small a tenth faster. Training allocates and frees: there
    they help in bfloat16 and cost in float32 (docs/speed.md).
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def matmul_flops_per_second(
    device: torch.device, dtype: torch.dtype, n: int | None = None
) -> float:
    """Measure this device's FLOP/s on a product of n x n matrices: after a warm-up, best of five.

    On a GPU it is the median of 20. The peak of GPU memory does not count this measurement.
    An MFU relative to this rate is right on any machine; one relative to a hard-coded peak is not.
    """
    if device.type == "cuda":
        reset_peak_memory(device)
        n = n or 8192
        seconds = _gpu_seconds(torch.randn(n, n, device=device, dtype=dtype))
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return 2 * n**3 / seconds
    n = n or 1024
    a = torch.randn(n, n, device=device, dtype=dtype)
    times = []
    for _ in range(6):
        start = time.perf_counter()
        torch.mm(a, a)
        times.append(time.perf_counter() - start)
    return 2 * n**3 / min(times[1:])


def _gpu_seconds(a: torch.Tensor) -> float:
    """Return the median seconds of the product a @ a on a GPU whose clock has gone up."""
    start = time.perf_counter()
    while time.perf_counter() - start < WARM_UP_SECONDS:
        torch.mm(a, a)
        synchronize(a.device)
    spans = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(20)]
    for first, last in spans:
        first.record()
        torch.mm(a, a)
        last.record()
    synchronize(a.device)
    return median(first.elapsed_time(last) for first, last in spans) / 1e3


def synchronize(device: torch.device) -> None:
    """Wait until the GPU has finished its work; on a CPU there is nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# Device type -> peak in MB before the latest reset, which the system's own counter forgets.
_earlier_peaks: dict[str, float] = {}


def reset_peak_memory(device: torch.device) -> None:
    """Restart the peak of `peak_memory_mb`; `whole_peak_memory_mb` keeps the one before."""
    _earlier_peaks[device.type] = whole_peak_memory_mb(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):  # except on Linux, the peak cannot be reset
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM


def whole_peak_memory_mb(device: torch.device) -> float:
    """Return the peak since the process began, counted as in `peak_memory_mb`."""
    return max(_earlier_peaks.get(device.type, 0.0), peak_memory_mb(device))


def peak_memory_mb(device: torch.device) -> float:
    """Return the peak since the reset in MB (10^6 bytes): of GPU tensors, or of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / 1e6
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6


def total_memory_bytes(device: torch.device) -> int:
    """Return all the memory that the device has, used or not."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def available_memory_bytes() -> int:
    """Return the system's memory that new processes can have; all of it if that is unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    found = [line for line in lines if line.startswith("MemAvailable:")]
    return int(found[0].split()[1]) * 1024 if found else total_memory_bytes(torch.device("cpu"))


def device_name(device: torch.device) -> str:
    """Return the name of the GPU or the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def missing_compiler(device: torch.device) -> str | None:
    """Return which compiler torch.compile lacks for this device, `C++` or `C`; None if it has it.

    For a GPU that is Triton's, which builds the launcher of each kernel.
    """
    if device.type == "cpu":
        named, others, language = "CXX", ("g++", "clang++"), "C++"
    else:
        named, others, language = "CC", ("gcc", "clang"), "C"
    found = any(shutil.which(name) for name in (os.environ.get(named, others[0]), *others))
    return None if found else language


def git_commit() -> str | None:
    """Return the commit of this source tree, `-dirty` if it has changes; None outside git."""
    here = source_tree()
    if here is None:  # an installed package may lie inside somebody else's repository
        return None
    command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
