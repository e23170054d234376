"""Runs on synthetic tasks in a comparison: accuracy, sections of tasks, and rows of sizes."""

import csv
import io
import json
from pathlib import Path

import pytest
from reporting import compared
from runfolders import write_run

from gptattn.compare.report import csv_text
from gptattn.compare.table import report_rows, short_rows
from gptattn.errors import ConfigError

TASK = {"task": "Recall", "val_rows": 10, "tokenizer": "none"}


def task_run(
    folder: Path,
    accuracy: float,
    seed: int = 1,
    *,
    task: str = "Recall",
    pairs: int = 4,
    length: int = 64,
    width: int = 16,
) -> Path:
    """A finished run on a task."""
    return write_run(
        folder,
        "mha",
        seed,
        4.0 - accuracy,
        metrics={"val/accuracy": accuracy, "val/bits_per_byte": None},
        data={**TASK, "task": task, "text_sha256": f"{pairs}{length}{task}"},
        config={"data": {"_target_": f"gptattn.data.tasks.{task}", "pairs": pairs}},
        context_length=length,
        d_model=width,
    )


def test_lengths_are_sections_and_widths_are_rows_with_their_mean_accuracy(tmp_path: Path) -> None:
    for length, pairs in ((64, 4), (128, 8)):
        for width, right in ((16, 0.25), (32, 1.0)):
            for seed in (1, 2):
                accuracy = right - 0.1 * (seed - 1)
                folder = tmp_path / f"{length}_{width}_{seed}"
                task_run(folder, accuracy, seed, pairs=pairs, length=length, width=width)
    found = compared(tmp_path)
    titles = [section.title for section in found.sections]
    assert titles == ["context_length=64 pairs=4", "context_length=128 pairs=8"]
    for section in found.sections:
        names = {row.name: row.mean("val/accuracy") for row in section.rows}
        assert names == pytest.approx({"mha model.d_model=16": 0.2, "mha model.d_model=32": 0.95})
        heading, *body = report_rows(section)
        assert "bits/byte" not in heading
        assert [row[heading.index("accuracy")] for row in body] == ["0.2000", "0.9500"]


def test_table_and_csv_have_the_accuracy_and_no_bits(tmp_path: Path) -> None:
    task_run(tmp_path / "a", 0.5)
    task_run(tmp_path / "b", 0.75, seed=2)
    found = compared(tmp_path)
    assert short_rows(found.runs)[0][:4] == ["variant", "seeds", "val loss", "accuracy"]
    (line,) = csv.DictReader(io.StringIO(csv_text(found)))
    assert float(line["val/accuracy"]) == 0.625
    assert "val/bits_per_byte" not in line


@pytest.mark.parametrize("other", ["Copy", None])
def test_another_task_and_a_text_are_not_compared_with_a_task(
    other: str | None, tmp_path: Path
) -> None:
    task_run(tmp_path / "a", 0.5)
    if other is None:
        write_run(tmp_path / "b", "mha", 1, 2.0)
    else:
        task_run(tmp_path / "b", 0.5, task=other)
    with pytest.raises(ConfigError, match=r"data \(task Recall, 10 validation rows"):
        compared(tmp_path)
    assert len(compared(tmp_path, split=True).sections) == 2


def test_rows_of_the_same_settings_but_other_data_are_not_averaged(tmp_path: Path) -> None:
    task_run(tmp_path / "a", 0.5)
    other = task_run(tmp_path / "b", 0.5, seed=2)
    summary = json.loads((other / "summary.json").read_text())
    summary["data"]["text_sha256"] = "other"
    (other / "summary.json").write_text(json.dumps(summary))
    (section,) = compared(tmp_path).sections
    assert [row.n for row in section.rows] == [1, 1]
