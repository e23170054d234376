"""Sweeps over parts and patterns: their runs are planned, named, found again and reported."""

from pathlib import Path

import pytest
from building import PROBE_CONFIGS
from support import command, run_folders, summary, tiny

from gptattn.compare.comparison import compare
from gptattn.compare.finished_runs import read_runs

MENU = (f"hydra.searchpath=[file://{PROBE_CONFIGS}]", "allow_targets=[probes,probe_parts]")


def sweep(folder: Path, *overrides: str) -> list[str]:
    short = ("budget.steps=1", "validation.count=1", "sample.tokens=0", "checkpoint=false")
    own = tiny(folder, *MENU, "model.num_layers=2", *short, *overrides)
    return ["-m", "hydra/launcher=basic", *own]


def test_subsets_of_parts_are_variants_found_again_and_rows_of_the_report(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = sweep(tmp_path, "attn=mha,gqa", "part=[],[probe_shift]", "seed=1")
    assert command(tmp_path, *given) == 0
    out = capfd.readouterr().out
    assert "1 seed, 3 comparisons" in out
    variants = ["gqa", "gqa+probe_shift", "mha", "mha+probe_shift"]
    runs = run_folders(tmp_path)
    assert sorted(summary(run)["variant"] for run in runs) == variants
    assert sorted(run.name.partition("_s1")[0] for run in runs) == variants
    assert all(len(run.name) == len(summary(run)["variant"] + "_s1_123456") for run in runs)
    assert command(tmp_path, *given) == 0
    assert "4 runs, 4 already done" in capfd.readouterr().out
    (section,) = compare(read_runs([tmp_path])[0]).sections
    assert (section.baseline, sorted(row.name for row in section.rows)) == ("mha", variants)
    assert section.warnings == []


def test_an_order_of_layers_or_parts_is_a_run_of_its_own(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    layers = ("[gqa,mqa]", "[mqa,gqa]", "[gqa]")
    for pattern in layers:
        assert command(tmp_path, *sweep(tmp_path, f"pattern={pattern}", "seed=1")) == 0
    capfd.readouterr()
    assert command(tmp_path, *sweep(tmp_path, f"pattern={','.join(layers)}", "seed=1")) == 0
    assert "3 runs, 3 already done" in capfd.readouterr().out
    assert command(tmp_path, *sweep(tmp_path, "attn=gqa", "seed=1")) == 0
    assert "1 run, 1 already done" in capfd.readouterr().out
    assert len(run_folders(tmp_path)) == 3
