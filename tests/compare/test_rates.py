"""Runs whose variants have learning rates of their own, as the report shows them."""

from pathlib import Path
from typing import Any

import pytest
from runfolders import write_run

from gptattn.compare.comparison import compare
from gptattn.compare.finished_runs import read_runs
from gptattn.compare.table import report_rows


def write(folder: Path, variant: str, seed: int, loss: float, lr: float, **choices: str) -> Path:
    picked = {"attn": variant, "block": "gpt2", "position": "learned", **choices}
    config: dict[str, Any] = {
        "choices": picked,
        "block": {"norm": picked["block"]},
        "position": {"_target_": picked["position"]},
        "optim": {"lr": lr},
    }
    name = f"{variant}_{picked['position']}_{picked['block']}_{lr}_{seed}"
    return write_run(folder / name, variant, seed, loss, config=config)


@pytest.fixture
def tuned(tmp_path: Path) -> Path:
    """Two blocks; in GPT-2's, mha with learned positions has a lower rate than the others."""
    rows = [
        ("mha", 2.0, 0.002, {}),
        ("mha", 1.9, 0.004, {"position": "alibi"}),
        ("gqa", 2.1, 0.004, {}),
        ("mha", 1.8, 0.004, {"block": "llama"}),
        ("gqa", 1.7, 0.004, {"block": "llama"}),
    ]
    for variant, loss, lr, choices in rows:
        for seed, more in enumerate([0.0, 0.001, 0.003], start=1):
            own = more * (1 + (variant == "gqa") + 2 * ("position" in choices))
            write(tmp_path / "tuned", variant, seed, loss + own, lr, **choices)
        write(tmp_path / "tuned" / "tuning", variant, 0, loss, lr, **choices)
    return tmp_path / "tuned"


def test_a_rate_of_its_own_is_a_column_and_tuning_is_left_out(tuned):
    runs, skipped = read_runs([tuned])
    assert skipped == [
        f"{tuned / 'tuning'}: runs that chose a learning rate; name the folder to see them"
    ]
    assert len(read_runs([tuned / "tuning"])[0]) == 5
    first, second = compare(runs).sections
    table = [row[:4] for row in report_rows(first)]
    assert table == [
        ["variant", "n", "lr", "val loss"],
        ["mha position=learned", "3", "0.002", "2.0013 ± 0.0038"],
        ["mha position=alibi", "3", "0.004", "1.9040 ± 0.0114"],
        ["gqa", "3", "0.004", "2.1027 ± 0.0076"],
    ]
    assert "each variant has a learning rate of its own, lr: 0.004: 6 runs; 0.002: 3 runs" in (
        first.warnings
    )
    # In the other block all have the same rate.
    assert report_rows(second)[0][:3] == ["variant", "n", "val loss"]
    assert [first.title, second.title] == ["block=gpt2", "block=llama"]


def test_rates_that_alone_part_two_rows_stay_in_their_names(tuned):
    write(tuned, "mha", 1, 2.5, 0.008)
    first = compare(read_runs([tuned])[0]).sections[0]
    assert {row.name for row in first.rows} >= {"mha position=learned optim.lr=0.008", "gqa"}
    assert "lr" not in report_rows(first)[0]
