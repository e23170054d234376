"""Memory peaks, algorithms that repeat, and what other systems lack."""

import importlib
import multiprocessing
import os
import pkgutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from building import settings

from gptattn.errors import ConfigError
from gptattn.machine.device import (
    find_toolchain,
    peak_memory_mb,
    reset_peak_memory,
    resolve_device,
)
from gptattn.machine.ending import as_user_error


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the peak cannot be reset")
def test_a_peak_that_was_reset_is_without_what_was_freed_before():
    cpu, block = torch.device("cpu"), b"x" * 100_000_000
    before = peak_memory_mb(cpu)
    del block
    reset_peak_memory(cpu)
    assert peak_memory_mb(cpu) < before - 50


def test_the_tools_for_a_gpu_are_found_or_named(monkeypatch):
    versions = {"triton": "3.7.1+git1a2b", "fla": "0.6.0"}
    monkeypatch.setattr("gptattn.machine.device.version_of", versions.get)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setenv("CC", sys.executable)
    found = find_toolchain(torch.device("cuda"))
    assert (found.capability, found.missing, found.triton, found.fla) == (
        (9, 0),
        "",
        (3, 7, 1),
        True,
    )
    monkeypatch.setenv("CC", "no such compiler")
    monkeypatch.setenv("PATH", "")
    assert "C compiler" in find_toolchain(torch.device("cuda")).missing
    versions.clear()
    found = find_toolchain(torch.device("cuda"))
    assert "Triton" in found.missing
    assert not found.fla


def test_an_algorithm_that_does_not_repeat_is_refused_in_one_line():
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError) as error:
            torch.zeros(3).put_(torch.tensor([0]), torch.tensor([1.0]))
    finally:
        torch.use_deterministic_algorithms(False)
    known = as_user_error(error.value)
    assert (known.field, known.exit_code) == ("trainer.deterministic", 2)
    assert "put_" in known.message


def test_a_mac_s_gpu_is_not_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == torch.device("cpu")
    with pytest.raises(ConfigError, match="one of auto, cpu, gpu"):
        settings("trainer.accelerator=mps")


def import_without_what_windows_lacks() -> None:
    for name in ("asyncio", "huggingface_hub.hf_file_system"):
        importlib.import_module(name)  # on Windows they do not need what is taken away here
    for name in [one for one in sys.modules if one.partition(".")[0] == "gptattn"]:
        del sys.modules[name]
    sys.modules |= dict.fromkeys(("resource", "termios", "pwd"))
    for name in ("SIGHUP", "SIGPIPE", "SIGKILL"):
        delattr(signal, name)
    for name in ("sysconf", "setpgrp", "sched_getaffinity"):
        delattr(os, name)
    import gptattn
    from gptattn.machine import device, disk, ending

    for one in pkgutil.walk_packages(gptattn.__path__, "gptattn."):
        importlib.import_module(one.name)
    device._read_proc = lambda *_: None
    assert device.peak_memory_mb(torch.device("cpu")) is None
    assert disk.free_bytes(Path()) > 0
    assert len(ending.handled_signals()) == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there it is held by every test")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_everything_imports_and_measures_without_what_windows_lacks():
    # A fork has the other libraries, which take ten seconds to import.
    child = multiprocessing.get_context("fork").Process(target=import_without_what_windows_lacks)
    child.start()
    child.join()
    assert child.exitcode == 0
