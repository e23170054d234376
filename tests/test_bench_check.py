"""The regression guard of the benchmarks, on rounds made by hand."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from docs_commands import dry_make

from gptattn.settings.compose import CONF

SCRIPT = CONF.parent / "scripts" / "bench_check.py"


def file(path: Path, peer: list[float], gqa: list[float], torch: str = "2.13.0") -> Path:
    seconds = {"train.py mha": [2.0] * len(peer), "peer a": peer, "train.py gqa": gqa}
    content: Any = {"benchmarks": {"nano": {"base": "train.py mha", "seconds": seconds}}}
    content |= {"processor": "a processor", "torch": torch}
    path.write_text(json.dumps(content))
    return path


def check(*files: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, files)]
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


def test_a_file_that_is_not_there_or_has_few_rounds_is_refused_in_one_line(tmp_path: Path) -> None:
    good = file(tmp_path / "good", peer=[2.1, 2.2, 2.3], gqa=[1.0, 1.1, 1.2])
    few = file(tmp_path / "few", peer=[2.1, 2.2], gqa=[1.0, 1.1])
    for files, said in (
        ((good, tmp_path / "none"), f"error: {tmp_path / 'none'} is not there; "),
        ((few, good), f"error: {few}: nano has 2 of the 3 rounds that a comparison needs; "),
        ((good, few), f"error: {few}: nano has 2 of the 3 rounds that a comparison needs; "),
    ):
        done = check(*files)
        assert done.returncode == 1
        assert done.stderr.startswith(said)
        assert done.stderr.count("\n") == 1


def test_a_file_with_something_else_in_it_is_refused_in_one_line(tmp_path: Path) -> None:
    good = file(tmp_path / "good", peer=[2.1, 2.2, 2.3], gqa=[1.0, 1.1, 1.2])
    content = json.loads(good.read_text())
    (tmp_path / "cut").write_text(good.read_text()[:40])
    (tmp_path / "list").write_text("[]")
    content["benchmarks"]["nano"]["seconds"]["peer a"].pop()
    (tmp_path / "uneven").write_text(json.dumps(content))
    (tmp_path / "empty").write_text(json.dumps(content | {"benchmarks": {}}))
    for name, said in (
        ("cut", "is not what `make bench` writes (JSONDecodeError"),
        ("list", "is not what `make bench` writes (TypeError"),
        ("uneven", "nano has 2 of the 3 rounds that a comparison needs"),
        ("empty", "error: the two files have no ratio in common, so nothing was compared"),
    ):
        done = check(tmp_path / name, good)
        assert done.returncode == 1
        assert said in done.stderr
        assert done.stderr.count("\n") == 1


def test_another_processor_or_torch_is_said(tmp_path: Path) -> None:
    rounds = [2.1, 2.2, 2.3]
    old, new = (file(tmp_path / torch, rounds, rounds, torch) for torch in ("2.11", "2.13"))
    said = check(new, old).stdout.splitlines()
    assert said[:2] == ["processor: a processor", "warning: torch: 2.13, before 2.11"]


def test_make_replaces_the_committed_file_only_after_all_is_measured() -> None:
    lines = dry_make(["bench"]).stdout.splitlines()
    (last,) = [i for i, line in enumerate(lines) if "benchmarks/latest.json" in line]
    assert lines[last] == "mv build/rounds.json benchmarks/latest.json"
    assert last == len(lines) - 1
    recorded = [line for line in lines if line.endswith(f"{CONF.parent}/build/rounds.json")]
    assert [line.split()[1] for line in recorded] == [
        "scripts/bench_train.py",
        "scripts/bench_attention.py",
    ]
    refused = dry_make(["bench", "ARGS=--rounds 3"])
    assert refused.returncode == 2
    assert "make bench takes no ARGS" in refused.stderr


def test_make_looks_for_the_committed_file_before_it_measures() -> None:
    lines = dry_make(["bench-check"]).stdout.splitlines()
    asked = [i for i, line in enumerate(lines) if line.endswith("scripts/bench_check.py")]
    measured = [i for i, line in enumerate(lines) if "scripts/bench_train.py" in line]
    assert asked[0] < measured[0]
