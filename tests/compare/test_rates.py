"""Runs whose variants have learning rates of their own, as the report shows them."""

from pathlib import Path

import pytest
from reporting import write_typed

from gptattn.compare.comparison import compare
from gptattn.compare.finished_runs import read_runs
from gptattn.compare.table import report_rows


@pytest.fixture
def tuned(tmp_path: Path) -> Path:
    """Two blocks; in GPT-2's, mha with learned positions has a lower rate than the others."""
    rows = {
        "attn=mha block=gpt2 optim.lr=0.002": (2.0, 1),
        "attn=mha position=alibi block=gpt2 optim.lr=0.004": (1.9, 3),
        "attn=gqa block=gpt2 optim.lr=0.004": (2.1, 2),
        "attn=mha block=llama optim.lr=0.004": (1.8, 1),
        "attn=gqa block=llama optim.lr=0.004": (1.7, 2),
    }
    for overrides, (loss, spread) in rows.items():
        for seed, more in enumerate([0.0, 0.001, 0.003], start=1):
            write_typed(tmp_path / "tuned", overrides, seed, loss + more * spread)
        write_typed(tmp_path / "tuned" / "tuning", overrides, 0, loss)
    return tmp_path / "tuned"


def test_a_rate_of_its_own_is_a_column_and_tuning_is_left_out(tuned):
    runs, (skipped,) = read_runs([tuned])
    assert "learning rates" in skipped
    assert len(read_runs([tuned / "tuning"])[0]) == 5
    first, second = compare(runs).sections
    table = [(row[0], row[2]) for row in report_rows(first)]
    alibi = ("mha position=alibi", "0.004")
    assert table == [("variant", "lr"), ("mha", "0.002"), alibi, ("gqa", "0.004")]
    # In the other block all have the same rate.
    assert report_rows(second)[0][:3] == ["variant", "n", "val loss"]
    assert [first.title, second.title] == ["block=gpt2", "block=llama"]


def test_rates_that_alone_part_two_rows_stay_in_their_names(tuned):
    write_typed(tuned, "attn=mha block=gpt2 optim.lr=0.008", 1, 2.5)
    first = compare(read_runs([tuned])[0]).sections[0]
    names = {"mha optim.lr=0.002", "mha optim.lr=0.008", "mha position=alibi", "gqa"}
    assert {row.name for row in first.rows} == names
    assert "lr" not in report_rows(first)[0]
