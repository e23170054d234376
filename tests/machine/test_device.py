"""Memory peaks, compilers, the git commit, and algorithms that repeat."""

import subprocess
from pathlib import Path

import pytest
import torch

from gptattn.machine.device import (
    git_commit,
    missing_compiler,
)
from gptattn.machine.ending import as_user_error


def test_the_commit_is_that_of_the_source_tree():
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    head = subprocess.run(command, capture_output=True, text=True)
    if head.returncode:
        pytest.skip("this source tree is in no repository")
    commit = git_commit()
    assert commit.removesuffix("-dirty") == head.stdout.strip()


@pytest.mark.parametrize(
    ("there", "on_cpu", "on_gpu"),
    [("gcc", "C++", None), ("g++", None, "C"), ("mine", "C++", None)],
)
def test_what_compiling_lacks_depends_on_the_device(there, on_cpu, on_gpu, monkeypatch, tmp_path):
    (tmp_path / there).write_text("")
    (tmp_path / there).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CC", "mine")
    monkeypatch.delenv("CXX", raising=False)
    assert missing_compiler(torch.device("cpu")) == on_cpu
    assert missing_compiler(torch.device("cuda")) == on_gpu


def test_an_algorithm_that_does_not_repeat_is_refused_in_one_line():
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError) as error:
            torch.zeros(3).put_(torch.tensor([0]), torch.tensor([1.0]))
    finally:
        torch.use_deterministic_algorithms(False)
    known = as_user_error(error.value)
    assert str(known).startswith("trainer.deterministic: torch's put_ has no ")
    assert known.exit_code == 2
