"""The benchmark's figures, worked by hand, the layers that it times, and its run on one GPU."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from building import build_gpt, chosen, through_cache
from contract import assert_same
from measuring.gpu import print_goals
from measuring.gpu_items import ITEMS
from measuring.menu import Stack
from measuring.tables import ratio, spread

from gptattn.attention import CacheGroup


def test_ratios_are_paired_by_round_and_spread_is_half_the_middle_half():
    # The rounds' ratios are 2, 1 and 4; the quotient of the medians would be 3 / 2.
    assert ratio([2.0, 3.0, 8.0], [1.0, 3.0, 2.0]) == 2
    # Of 1 to 8 the quarters lie at 3 and 6, and the median is 4.5.
    assert spread([8.0, 1.0, 7.0, 2.0, 6.0, 3.0, 5.0, 4.0]) == pytest.approx(1.5 / 4.5)


@pytest.mark.parametrize("variant", ["cross_layer", "gqa+value_residual"])
def test_layers_in_a_row_do_what_the_model_does(variant):
    model = build_gpt(*chosen(variant), "model.num_layers=3", "position=none", std=0.3).double()
    stack, ids = Stack(model.layers()), torch.randint(13, (2, 7))

    def step(part: torch.Tensor, cache: CacheGroup) -> torch.Tensor:
        y = stack(part, cache)
        cache.advance(part.shape[1])
        return y

    with torch.no_grad():
        x = model.token_embedding(ids)
        assert_same(model.norm(stack(x)), model.hidden(ids))
        cached = through_cache(step, x, stack.new_cache(2, 7), [3, 1, 1, 2])
        assert_same(model.norm(cached), model.hidden(ids))


def test_a_goal_says_whether_a_ratio_is_within_its_bound_or_not_measured(capsys):
    run, step = {"tokens_per_s": 97.0, "tflops": 49.0}, {"tokens_per_s": 100.0, "ms": 50.0}
    padded = {"mha:compile=true:model.vocab_size=50257": {"ms": 51.0}}
    print_goals(
        {item: {} for item in ITEMS}
        | {"run": {"log_every=10": run}, "device": {"rates": {"tflops": 100.0}}}
        | {"step": {"mha:compile=true": step, **padded}}
    )
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert any(re.fullmatch(r"train.py / rate of products +>=0.50 +0.490 +no", x) for x in lines)
    assert any(re.fullmatch(r"train.py / a plain loop +>=0.97 +0.970 +yes", x) for x in lines)
    assert any(re.fullmatch(r"50,257 ids / 50,304, time +<=1.03 +1.020 +yes", x) for x in lines)
    assert any(re.fullmatch(r"train.py / transformers +>=1.00", x) for x in lines)


@pytest.mark.slow
def test_the_run_on_one_gpu_ends_on_a_cpu_too_and_goes_on_after_a_kill(tmp_path):
    def read() -> dict[str, dict[str, dict[str, object]]]:
        return {file.stem: json.loads(file.read_text()) for file in tmp_path.glob("*.json")}

    script = Path(__file__).parents[1] / "scripts" / "bench.py"
    command = [sys.executable, str(script), "gpu", f"out={tmp_path}", "device=cpu", "tiny=true"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        next(line for line in killed.stdout if line.startswith("head: "))
        killed.kill()
    before = read()
    assert "step" not in before
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    after = read()
    assert done.returncode == 0, done.stdout
    assert {item: {*cells} for item, cells in after.items()} == {
        item: {*of.cells} for item, of in ITEMS.items()
    }
    for item, cells in before.items():  # what had ended was not taken again
        assert all(after[item][name] == own for name, own in cells.items() if "error" not in own)
