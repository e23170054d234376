"""The exercises print the right numbers, checked against torch's plain operations."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

SCRIPT = Path(__file__).parents[2] / "scripts" / "exercises.py"
GOLDEN = json.loads(Path(__file__).with_name("golden.json").read_text(encoding="utf-8"))
X = torch.tensor(GOLDEN["inputs_6x3"])


@pytest.fixture(scope="module")
def exercises() -> ModuleType:
    spec = importlib.util.spec_from_file_location("exercises", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def linear(width: int) -> Tensor:
    """Return X through an `nn.Linear` with the next weights that the seed gives."""
    with torch.no_grad():
        return nn.Linear(3, width, bias=False)(X)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.T / q.shape[-1] ** 0.5).exp().tril()
    return weights / weights.sum(-1, keepdim=True) @ v


def test_exercise_1_gives_one_output_in_both_forms(exercises):
    v1, v2 = exercises.same_output_from_both_forms()
    expected = torch.tensor(GOLDEN["cases"][0]["output"])
    for output in (v1, v2):
        torch.testing.assert_close(output, expected, rtol=0, atol=6e-5)
    torch.testing.assert_close(v1, v2)


def test_exercise_2_gives_two_numbers_per_token(exercises):
    torch.manual_seed(123)
    expected = torch.cat([causal(linear(1), linear(1), linear(1)) for _ in range(2)], dim=-1)
    assert expected.shape == (6, 2)
    torch.testing.assert_close(
        exercises.two_dimensional_contexts(), torch.stack([expected, expected])
    )


def test_exercise_3_counts_the_parameters(exercises):
    # Four square matrices, and the bias of the last.
    assert exercises.gpt2_small_parameters() == 2_360_064 == 4 * 768 * 768 + 768


def test_the_grouped_exercise_shares_each_key_and_value_head_between_two_queries(exercises):
    torch.manual_seed(123)
    q, k, v = (linear(width).split(2, dim=-1) for width in (8, 4, 4))
    expected = torch.stack([causal(q[h], k[g], v[g]) for h, g in enumerate((0, 0, 1, 1))])
    for output in exercises.grouped_heads():
        torch.testing.assert_close(output, torch.stack([expected, expected]))


def test_the_script_prints_all_four_answers():
    run = subprocess.run(
        [sys.executable, SCRIPT], capture_output=True, text=True, check=True, timeout=120
    )
    assert run.stderr == ""
    lines = run.stdout.splitlines()
    for exercise in ("3.1  ", "3.2  ", "3.3  ", "GQA  "):
        assert sum(line.startswith(exercise) for line in lines) == 1
    assert sum(line.endswith(": True") for line in lines) == 3
    for number in ("-0.5337", "-0.1051", "-0.5740", "0.2216", "2,360,064"):
        assert number in run.stdout
