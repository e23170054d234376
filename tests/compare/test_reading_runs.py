"""Reading run folders: damaged, odd or unfinished ones are reported and skipped; open sweeps."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from reporting import LOSSES
from runfolders import write_run, write_sweep
from support import refuses

from gptattn.compare.finished_runs import read_runs
from gptattn.compare.report import describe_open_sweeps
from gptattn.compare.table import load_runs
from gptattn.runs.folder import RunFolder
from gptattn.runs.planned_runs import write_planned

CODE = "a: !!python/object/apply:os.system [true]"
WRONG: list[dict[str, Any]] = [
    {"seed": "one"},
    {"data": {}},
    {"status": "running"},
    *({"metrics": {"val/loss": x}} for x in (math.nan, None, 10**400)),
]


def test_load_runs_has_a_row_per_run_with_metrics_and_settings(tmp_path):
    sweep = write_sweep(tmp_path / "runs", LOSSES, d_model=48)
    (write_run(sweep / "bad", "mha", 9, 2.0) / "summary.json").unlink()
    runs = load_runs(sweep)
    found = {(row["variant"], row["seed"]): row["val/loss"] for _, row in runs.iterrows()}
    assert found == {(v, s): x for v, xs in LOSSES.items() for s, x in enumerate(xs, start=1)}
    assert all(Path(folder).is_dir() for folder in runs["folder"])
    assert set(runs["model.d_model"]) == {"48"}
    assert runs.groupby("variant")["val/loss"].mean()["mha"] == pytest.approx(2.02)
    assert runs.attrs["skipped"] == [f"{sweep / 'bad'}: not finished"]


@pytest.mark.parametrize(
    ("file", "wrong"),
    [
        *(("config.yaml", content) for content in ("{", "- 1", CODE)),
        *(("summary.json", content) for content in ("{", "[]", *WRONG)),
        ("summary.json", None),
        ("model.safetensors", ""),
    ],
)
def test_a_run_that_is_damaged_or_has_no_result_is_named_and_skipped(file, wrong, tmp_path):
    write_run(tmp_path / "good", "mha", 1, 2.0)
    bad = write_run(tmp_path / "bad", "mha", 2, 2.0)
    if isinstance(wrong, dict):
        wrong = json.dumps(json.loads((bad / file).read_text()) | wrong)
    if not wrong:  # the second has converted weights, which were not trained
        (bad / "summary.json").unlink()
    if wrong is not None:
        (bad / file).write_text(wrong)
    runs, (line,) = read_runs([tmp_path])
    assert [run.folder.name for run in runs] == ["good"]
    assert line.startswith(f"{bad}: ")
    if not wrong:
        assert ("not finished" if wrong is None else "without training") in line
    assert "\n" not in line


def test_folders_without_a_finished_run_are_an_error(tmp_path):
    with refuses("run folder: no finished run", 3):
        read_runs([tmp_path])
    with refuses("run folder: not a folder", 3):
        read_runs([tmp_path / "none"])
    (write_run(tmp_path / "a", "mha", 1, 2.0) / "summary.json").unlink()
    with refuses("run folder: 1 skipped", 3):
        read_runs([tmp_path])


def test_open_runs_of_a_sweep_are_counted(tmp_path):
    sweep = tmp_path / "sweep"
    names = ["mha_s1_000001", "mha_s2_000002", "gqa_s1_000003", "mqa_s1_000004", "mqa_s2_000005"]
    for seed, name in enumerate(names[:2], start=1):
        write_run(sweep / name, "mha", seed, 2.0)
    write_planned(sweep, names[:2])
    assert describe_open_sweeps([sweep]) == []
    (sweep / names[2]).mkdir()
    RunFolder(sweep / names[2]).write_failure(5, "loss is NaN")
    write_planned(sweep, names)
    assert describe_open_sweeps([tmp_path]) == [f"{sweep}: 2 of 5 runs are done"]
