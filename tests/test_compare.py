"""Reading run folders, and grouping them over seeds."""

import json
import os
from pathlib import Path

import pytest
import yaml

from gptattn.compare.main import main
from gptattn.compare.runs import read_runs
from gptattn.compare.table import COLUMNS, group_runs, rows
from gptattn.errors import DataError


def write_run(folder: Path, variant: str, seed: int, loss: float, **settings: object) -> Path:
    """A finished run as `run.py` leaves it, as far as the comparison reads it."""
    folder.mkdir(parents=True)
    config = {
        "choices": {"attn": variant},
        "seed": seed,
        "attn": {"_target_": f"gptattn.attention.{variant}"},
        "model": {"d_mlp": None},
        "sample": {"tokens": 8},
    }
    config["model"].update(settings)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    metrics = {metric: 1000.0 for _, metric, *_ in COLUMNS} | {"val/loss": loss}
    summary = {
        "variant": variant,
        "seed": seed,
        "metrics": metrics,
        "data": {"text_sha256": "abc"},
        "hyperparameters": {"device": "cpu"},
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_seeds_of_one_variant_are_one_row_with_mean_and_deviation(tmp_path: Path) -> None:
    for seed, loss in ((1, 2.0), (2, 2.5), (3, 3.0)):
        write_run(tmp_path / f"gqa_s{seed}", "gqa", seed, loss)
    heading, row = rows(read_runs([tmp_path])[0])
    cells = dict(zip(heading, row, strict=True))
    # By hand: mean 2.5, deviations -0.5, 0, 0.5, over n - 1 = 2.
    assert (cells["variant"], cells["seeds"], cells["val loss"]) == ("gqa", "3", "2.5000 ± 0.5000")


def test_runs_that_differ_in_any_setting_are_never_averaged(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "mha", 1, 2.0)
    write_run(tmp_path / "b", "mha", 2, 3.0, d_mlp=512)
    groups = group_runs(read_runs([tmp_path])[0])
    assert set(groups) == {"mha model.d_mlp=None", "mha model.d_mlp=512"}


def test_a_repeated_seed_is_no_further_sample(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "mha", 1, 2.0)
    write_run(tmp_path / "b", "mha", 1, 2.0)
    write_run(tmp_path / "c", "mha", 2, 2.5)
    (members,) = group_runs(read_runs([tmp_path])[0]).values()
    assert [run.seed for run in members] == [1, 2]


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"variant": "mha"}'])
def test_a_damaged_run_is_named_and_passed_over(content: str | None, tmp_path: Path) -> None:
    write_run(tmp_path / "good", "mha", 1, 2.0)
    bad = write_run(tmp_path / "bad", "mha", 2, 2.0) / "summary.json"
    if content is None:
        bad.unlink()
    else:
        bad.write_text(content)
    runs, passed_over = read_runs([tmp_path])
    assert [run.folder.name for run in runs] == ["good"]
    assert len(passed_over) == 1
    assert str(bad.parent) in passed_over[0]


def test_the_copy_of_hydra_is_not_taken_for_a_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", "mha", 1, 2.0)
    (run / ".hydra").mkdir()
    (run / ".hydra" / "config.yaml").write_text("{}")
    assert len(read_runs([tmp_path])[0]) == 1
    assert read_runs([tmp_path])[1] == []


def test_folders_without_a_finished_run_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no finished run"):
        read_runs([tmp_path])
    with pytest.raises(DataError, match="is no folder"):
        read_runs([tmp_path / "none"])


@pytest.mark.parametrize("columns", ["80", "200"])
def test_the_table_names_the_variants_at_any_width(
    columns: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    write_run(tmp_path / "a", "mha_wrapper", 1, 2.0)
    monkeypatch.setattr("sys.argv", ["gptattn-compare", str(tmp_path)])
    monkeypatch.setitem(os.environ, "COLUMNS", columns)
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 0
    assert "mha_wrapper" in capsys.readouterr().out
