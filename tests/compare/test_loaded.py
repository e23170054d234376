"""The comparison as a Python object: `from gptattn.compare import load`."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reporting import LOSSES
from runfolders import write_run, write_sweep

from gptattn.compare import load
from gptattn.compare.loaded import Loaded
from gptattn.errors import ConfigError


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load(write_sweep(tmp_path_factory.mktemp("sweep") / "runs", LOSSES))


def test_there_is_a_row_per_variant_with_the_reports_figures(loaded: Loaded) -> None:
    mha, gqa, mqa = loaded.rows()
    assert [row["variant"] for row in (mha, gqa, mqa)] == ["mha", "gqa", "mqa"]
    # t(0.975, 4) = 2.776445 from the table.
    half = 2.776445 * np.std(LOSSES["gqa"], ddof=1) / 5**0.5
    assert (gqa["loss"], gqa["n"]) == (pytest.approx(2.14), 5)
    assert (gqa["low"], gqa["high"]) == pytest.approx((2.14 - half, 2.14 + half), abs=1e-6)
    # Two comparisons: t(1 - 0.0125, 4) = 3.4954; the deviation is that of test_compare_report.
    half = 3.4954 * (0.0002 / 4) ** 0.5 / 5**0.5
    assert gqa["difference"] == pytest.approx(0.12)
    assert gqa["difference_high"] == pytest.approx(0.12 + half, abs=1e-6)
    assert gqa["shown"] is True
    assert gqa["p"] < 0.001
    assert (mha["difference"], mha["p"], mha["baseline"]) == (None, None, "mha")
    assert mqa["cost/kv_bytes_per_token"] == 1024


def test_there_is_a_row_per_run(loaded: Loaded) -> None:
    rows = loaded.run_rows()
    found = {(row["variant"], row["seed"]): row["loss"] for row in rows}
    assert found == {(v, s): x for v, xs in LOSSES.items() for s, x in enumerate(xs, start=1)}
    assert all(Path(row["folder"]).is_dir() for row in rows)


def test_a_figure_that_no_run_has_is_none(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "mha", 1, 2.0, metrics={"perf/peak_memory_training_mb": None})
    (row,) = load(tmp_path).rows()
    assert row["perf/peak_memory_training_mb"] is None
    assert (row["low"], row["n"]) == (None, 1)


def test_with_pandas_the_rows_are_a_table(loaded: Loaded) -> None:
    pytest.importorskip("pandas")
    table = loaded.table().set_index("variant")
    assert list(table.index) == ["mha", "gqa", "mqa"]
    assert table.loc["gqa", "difference"] == pytest.approx(0.12)
    assert np.isnan(table.loc["mha", "difference"])
    assert loaded.runs().groupby("variant")["loss"].mean()["mha"] == pytest.approx(2.02)


def test_without_pandas_one_line_says_how_to_get_it(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    for frame in (loaded.table, loaded.runs):
        with pytest.raises(
            ConfigError, match=r"^pandas: is not installed; pip install 'gptattn\[t"
        ):
            frame()


def test_the_arguments_are_those_of_the_command(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "runs", LOSSES)
    assert load(sweep, baseline="gqa").rows()[0]["variant"] == "gqa"
    with pytest.raises(ConfigError, match="--baseline"):
        load(sweep, baseline="gpa")


def test_importing_it_is_light() -> None:
    code = "import sys; from gptattn.compare import load; print(*sys.modules)"
    command = [sys.executable, "-c", code]
    done: Any = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert not {"torch", "scipy", "matplotlib", "numpy", "pandas"} & set(done.stdout.split())
