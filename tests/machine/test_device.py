"""Huge pages, memory peaks, compilers and the git commit."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gptattn.machine.device import (
    git_commit,
    missing_compiler,
    peak_memory_mb,
    reset_peak_memory,
    whole_peak_memory_mb,
)

THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
SCRIPT = """
import torch
from gptattn.machine.device import use_huge_pages
{call}
numbers = torch.ones(2**24)
rollup = open("/proc/self/smaps_rollup").read()
print(rollup.partition("AnonHugePages:")[2].split()[0])
"""


@pytest.mark.skipif(
    not THP.exists() or "[madvise]" not in THP.read_text(), reason="no huge pages on request"
)
def test_large_tensors_lie_in_huge_pages_where_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)

    def kilobytes(call: str) -> int:
        command = [sys.executable, "-c", SCRIPT.format(call=call)]
        return int(subprocess.run(command, capture_output=True, check=True).stdout)

    assert kilobytes("") == 0
    assert kilobytes("use_huge_pages()") > 2**15  # of 2**16


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the peak cannot be reset")
def test_a_new_peak_begins_where_the_process_is_and_the_whole_one_stays() -> None:
    cpu = torch.device("cpu")
    reset_peak_memory(cpu)
    before = peak_memory_mb(cpu)
    block = b"x" * 200_000_000
    assert peak_memory_mb(cpu) >= before + 190
    high = whole_peak_memory_mb(cpu)
    assert high >= before + 190
    del block
    for _ in range(2):  # the second reset must not forget what came before the first
        reset_peak_memory(cpu)
        assert peak_memory_mb(cpu) < before + 100
        # The system sums it from counters of each processor: some hundred kB are noise.
        assert whole_peak_memory_mb(cpu) >= high - 5


def test_the_commit_is_that_of_the_source_tree() -> None:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    head = subprocess.run(command, capture_output=True, text=True)
    if head.returncode:
        pytest.skip("this source tree is in no repository")
    commit = git_commit()
    assert commit is not None
    assert commit.removesuffix("-dirty") == head.stdout.strip()


GPU = torch.device("cuda")


@pytest.mark.parametrize(
    ("there", "on_cpu", "on_gpu"),
    [
        ((), "C++", "C"),
        (("gcc",), "C++", None),
        (("g++",), None, "C"),
        (("clang", "clang++"), None, None),
        (("mine",), "C++", None),  # of CC, below
    ],
)
def test_what_compiling_lacks_depends_on_the_device(
    there: tuple[str, ...],
    on_cpu: str | None,
    on_gpu: str | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    for name in there:
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CC", "mine")
    monkeypatch.delenv("CXX", raising=False)
    assert missing_compiler(torch.device("cpu")) == on_cpu
    assert missing_compiler(GPU) == on_gpu
