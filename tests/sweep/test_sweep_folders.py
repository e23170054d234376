"""A sweep makes a folder per run, and each run in it is the run alone."""

import re
from pathlib import Path

from support import command, config, losses, run_folders, summary, tiny


def test_a_sweep_makes_a_folder_per_run_with_a_readable_name(tmp_path: Path) -> None:
    arguments = tiny(tmp_path, "budget.steps=2", "checkpoint=false", "experiment_name=four")
    sweep = ["attn=mha,gqa", "seed=1,2"]
    assert command(tmp_path, "-m", *arguments, *sweep) == 0
    runs = run_folders(tmp_path)
    assert len(runs) == 4
    assert {run.parent for run in runs} == {tmp_path / "outputs" / "four"}
    for run in runs:
        record = summary(run)
        # What all runs of a sweep share tells none from another.
        assert re.fullmatch(rf"{record['variant']}_s{record['seed']}_[0-9a-f]{{6}}", run.name)
        assert record["run"] == run.name
        assert config(run)["seed"] == record["seed"]
        assert len(list(run.glob("events.out.*"))) == 1
    assert {(summary(run)["variant"], summary(run)["seed"]) for run in runs} == {
        (variant, seed) for variant in ("mha", "gqa") for seed in (1, 2)
    }
    files = {path.name for path in (tmp_path / "outputs" / "four").iterdir() if path.is_file()}
    assert files == {"multirun.yaml", "ledger.jsonl", ".sweep.lock"}


def test_a_run_in_a_sweep_is_the_run_alone(runs: dict[str, Path], tmp_path: Path) -> None:
    arguments = tiny(tmp_path, "model.num_layers=2", "attn=mha,gqa", "-m")
    assert command(tmp_path, *arguments) == 0
    for run in run_folders(tmp_path):
        alone = runs[summary(run)["variant"]]
        assert losses(run) == losses(alone)
        assert summary(run)["metrics"]["cost/params"] == summary(alone)["metrics"]["cost/params"]
