"""Memory peaks, and algorithms that repeat."""

import sys

import pytest
import torch

from gptattn.machine.device import peak_memory_mb, reset_peak_memory
from gptattn.machine.ending import as_user_error


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the peak cannot be reset")
def test_a_peak_that_was_reset_is_without_what_was_freed_before():
    cpu, block = torch.device("cpu"), b"x" * 100_000_000
    before = peak_memory_mb(cpu)
    del block
    reset_peak_memory(cpu)
    assert peak_memory_mb(cpu) < before - 50


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
