"""Algorithms that repeat; the precision of products is tested where runs use it."""

import os

import pytest
import torch

from gptattn.errors import ConfigError
from gptattn.machine.arithmetic import repeatable

GPU = torch.device("cuda")


def without_a_repeatable_algorithm() -> None:
    torch.zeros(3).put_(torch.tensor([0]), torch.tensor([1.0]))


def test_where_asked_for_an_algorithm_that_does_not_repeat_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that it is restored
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    refusal = pytest.raises(ConfigError, match=r"^trainer\.deterministic: torch's put_ has no ")
    with refusal, repeatable(True, GPU):
        without_a_repeatable_algorithm()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"  # read at cuBLAS's first use
    assert not torch.are_deterministic_algorithms_enabled()
    with repeatable(False, GPU), repeatable(True, torch.device("cpu")):
        without_a_repeatable_algorithm()
    with pytest.raises(RuntimeError, match="another"), repeatable(True, GPU):
        raise RuntimeError("another")
