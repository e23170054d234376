"""The regression guard of the benchmarks, on rounds made by hand."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from gptattn.cli.compose import CONF

SCRIPT = CONF.parent / "scripts" / "bench_check.py"


def file(path: Path, peer: list[float], gqa: list[float]) -> Path:
    seconds = {"train.py mha": [2.0, 2.0, 2.0, 2.0], "peer a": peer, "train.py gqa": gqa}
    content: Any = {"benchmarks": {"nano": {"base": "train.py mha", "seconds": seconds}}}
    path.write_text(json.dumps(content))
    return path


def check(measured: Path, committed: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), str(measured), str(committed)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_ratio_is_worse_where_its_interval_lies_wholly_below_the_committed_one(
    tmp_path: Path,
) -> None:
    committed = file(tmp_path / "a", peer=[2.2, 2.1, 2.2, 2.1], gqa=[1.0, 1.1, 1.0, 1.1])
    # Ours needs 2 seconds: against the peer 1.075 before, and 0.925 now; gqa is as it was.
    slower = file(tmp_path / "b", peer=[1.8, 1.9, 1.8, 1.9], gqa=[1.1, 1.0, 1.1, 1.0])
    done = check(slower, committed)
    assert done.returncode == 1
    assert done.stderr.strip().endswith("nano: train.py mha / peer a")
    # The logarithms of 1.1, 1.05, 1.1, 1.05 have mean 0.07205 and standard deviation 0.026858; with
    # 3 degrees of freedom half of the interval is 3.182446 * 0.026858 / 2 = 0.042737.
    assert "1.075 [1.030, 1.122]" in done.stdout
    assert check(committed, slower).returncode == 0
    noisy = file(tmp_path / "c", peer=[1.2, 2.6, 1.4, 2.4], gqa=[1.0, 1.1, 1.0, 1.1])
    assert check(noisy, committed).returncode == 0
