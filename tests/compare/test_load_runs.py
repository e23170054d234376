"""Runs and the comparison as pandas DataFrames."""

from pathlib import Path

import numpy as np
import pytest
from reporting import LOSSES
from runfolders import write_run, write_sweep

from gptattn.compare import load_runs
from gptattn.compare.comparison import load_comparison
from gptattn.errors import ConfigError


def test_load_runs_has_a_row_per_run_with_metrics_and_settings(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "runs", LOSSES, d_model=48)
    (write_run(sweep / "bad", "mha", 9, 2.0) / "summary.json").unlink()
    runs = load_runs(sweep)
    found = {(row["variant"], row["seed"]): row["val/loss"] for _, row in runs.iterrows()}
    assert found == {(v, s): x for v, xs in LOSSES.items() for s, x in enumerate(xs, start=1)}
    assert all(Path(folder).is_dir() for folder in runs["folder"])
    assert set(runs["model.d_model"]) == {"48"}
    assert runs.groupby("variant")["val/loss"].mean()["mha"] == pytest.approx(2.02)
    assert runs.attrs["skipped"] == [f"{sweep / 'bad'}: not finished"]


def test_the_table_has_a_row_per_variant_with_the_reports_figures(tmp_path: Path) -> None:
    table = load_comparison(write_sweep(tmp_path / "runs", LOSSES)).table().set_index("variant")
    assert list(table.index) == ["mha", "gqa", "mqa"]
    gqa = table.loc["gqa"]
    # t(0.975, 4) = 2.776445 from the table.
    half = 2.776445 * np.std(LOSSES["gqa"], ddof=1) / 5**0.5
    assert (gqa["val/loss"], gqa["n"]) == (pytest.approx(2.14), 5)
    assert gqa["val/loss high"] == pytest.approx(2.14 + half, abs=1e-6)
    # Two comparisons: t(1 - 0.0125, 4) = 3.4954; the deviation is that of test_compare_report.
    half = 3.4954 * (0.0002 / 4) ** 0.5 / 5**0.5
    assert gqa["difference"] == pytest.approx(0.12)
    assert gqa["difference high"] == pytest.approx(0.12 + half, abs=1e-6)
    assert np.isnan(table.loc["mha", "difference"])
    assert table.loc["mqa", "cost/kv_bytes_per_token"] == 1024


def test_the_fronts_prefer_low_costs_and_high_speed(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "mha", 1, 2.0, metrics={"perf/tokens_per_s": 1000.0})
    small = {"perf/tokens_per_s": 2000.0, "cost/params": 900}
    write_run(tmp_path / "b", "gqa", 1, 2.1, metrics=small)
    write_run(tmp_path / "c", "mqa", 1, 2.2, metrics={"perf/tokens_per_s": 500.0})
    table = load_comparison(tmp_path).table()
    assert dict(zip(table["variant"], table["pareto"], strict=True)) == {
        "mha": "params cache flops speed",
        "gqa": "params speed",
        "mqa": "",
    }


def test_load_comparison_takes_the_commands_arguments(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "runs", LOSSES)
    assert load_comparison(sweep, baseline="gqa").table()["variant"][0] == "gqa"
    with pytest.raises(ConfigError, match=r"--baseline: 'gpa' is not a row.*did you mean gqa\?"):
        load_comparison(sweep, baseline="gpa")
