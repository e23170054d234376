"""The report of accuracies by length and slice: columns, a figure, and lengths not tested."""

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from reporting import only_section, page_text, report
from rich.console import Console
from runfolders import write_run

from gptattn.compare.curves import accuracies_by_length
from gptattn.compare.table import report_rows, section_table

LENGTHS = {"validation": {"fraction": 0.1, "count": 5, "lengths": [64, 128, 1024]}}
OF_TASK = {"task": "Parity", "val_rows": 9}
T975 = 4.302653  # Student's t for two degrees of freedom, from a table


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Three seeds of two variants; `gqa` was not tested beyond 128."""
    for variant, lengths in (("gqa", (64, 128)), ("mha", (64, 128, 1024))):
        for seed in (1, 2, 3):
            found = {f"val/accuracy_{n}": 1 - 0.1 * seed * (n > 64) for n in lengths}
            found |= {"val/accuracy": 0.9, "val/accuracy_pairs_16": 0.5, "val/accuracy_pairs_4": 1}
            own = {"metrics": found, "data": OF_TASK, "config": LENGTHS}
            write_run(tmp_path / f"{variant}_s{seed}", variant, seed, 2.0 + seed / 100, **own)
    return tmp_path


def test_each_length_and_slice_is_a_column_after_the_accuracy(sweep, capsys):
    headings, _, gqa = report_rows(only_section(sweep))
    start = headings.index("accuracy")
    assert headings[start + 1 : start + 6] == [
        *("at 64", "at 128", "at 1024", "at pairs_4", "at pairs_16")
    ]
    section_table(only_section(sweep)).print(Console(width=77))
    out = " ".join(capsys.readouterr().out.split())
    assert "report's files: 95% interval, p, at 1024, at pairs_4, at pairs_16, " in out
    assert gqa[start + 1 : start + 6] == ["1.0000", "0.8000", "\u2013", "1.0000", "0.5000"]


def test_a_seed_that_solves_the_task_does_so_at_every_length(tmp_path):
    for seed, (short, long) in enumerate([(1.0, 0.99), (1.0, 0.98), (0.98, 1.0)], 1):
        own = {"val/accuracy": short, "val/accuracy_80": long}
        write_run(tmp_path / f"mha_s{seed}", "mha", seed, 2.0, metrics=own, data=OF_TASK)
    headings, mha = report_rows(only_section(tmp_path))
    assert mha[headings.index("solved")] == "1/3"


def test_the_band_of_a_length_is_its_interval_over_seeds(sweep):
    bands = accuracies_by_length(only_section(sweep))
    assert [*bands["gqa"].x] == [64, 128]
    assert [*bands["mha"].x] == [64, 128, 1024]
    half = T975 * 0.1 / 3**0.5
    assert bands["mha"].low[1:] == pytest.approx([0.8 - half] * 2)
    assert bands["mha"].high[1:] == pytest.approx([0.8 + half] * 2)


def test_the_page_has_the_figure_and_says_what_was_not_tested(sweep, capsys):
    report(sweep)
    page = page_text(sweep / "comparison" / "comparison.html")
    for shown in ("Accuracy by length", "not tested beyond the trained length"):
        assert shown in page
    drawn = ET.parse(sweep / "comparison" / "accuracy_length.svg").iter()
    assert {"mha", "gqa", "1,024"} <= {"".join(node.itertext()) for node in drawn}
    assert "cannot exceed: gqa\n" in capsys.readouterr().out
