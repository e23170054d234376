"""What the machine is asked for."""

import subprocess
import sys
from pathlib import Path

import pytest

THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
SCRIPT = """
import torch
from gptattn.device import use_huge_pages
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
