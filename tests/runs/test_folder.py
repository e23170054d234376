"""RunFolder reads the files of a run's folder, whatever they contain."""

import json
import os
from pathlib import Path

import pytest
from building import settings

from gptattn.runs.folder import RunFolder, find_begun, step_of


def summary(folder: Path, content: object) -> RunFolder:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").write_text(json.dumps(content), encoding="utf-8")
    return RunFolder(folder)


def test_a_summary_counts_once_it_is_whole_and_says_that_the_run_is_done(tmp_path):
    run = RunFolder(tmp_path)
    assert (run.done, run.finished_summary(), run.final_loss()) == (False, None, None)
    for text in ('{"status": "done", "metrics": {"val/lo', "[1, 2]", "\x00", "3"):
        (tmp_path / "summary.json").write_text(text)
        assert (run.done, run.finished_summary()) == (True, None)
        with pytest.raises(ValueError, match=r"summary\.json"):
            run.read_summary()
    whole = {"status": "done", "metrics": {"val/loss": 2.5}}
    assert summary(tmp_path, whole).finished_summary() == whole
    assert run.final_loss() == 2.5
    summary(tmp_path, whole | {"status": "failed"})
    assert run.read_summary()["status"] == "failed"
    assert run.finished_summary() is None


def test_settings_read_back_as_written_even_from_another_version(tmp_path):
    run, cfg = RunFolder(tmp_path), settings("attn=gqa", "seed=7")
    assert not run.begun
    run.write_settings(cfg)
    assert run.begun
    assert run.read_settings()["attn"] == cfg.attn
    assert run.read_settings()["seed"] == 7
    (tmp_path / "config.yaml").write_text("attention: mha\n")
    assert run.read_settings()["attention"] == "mha"
    (tmp_path / "config.yaml").write_text("a: [1")
    with pytest.raises(ValueError, match=r"config\.yaml"):
        run.read_settings()


def test_runs_below_a_folder_come_by_age_and_only_from_their_level(tmp_path):
    for i, name in enumerate(("c", "a", "b")):
        run = RunFolder(tmp_path / "sweep" / name)
        run.path.mkdir(parents=True)
        run.config_file.touch()
        os.utime(run.config_file, (i, i))
    assert [run.path.name for run in find_begun(tmp_path / "sweep")] == ["b", "a", "c"]
    assert find_begun(tmp_path) == find_begun(tmp_path / "none") == []


def test_checkpoints_are_known_by_their_names_the_newest_first(tmp_path):
    run = RunFolder(tmp_path)
    assert run.known_checkpoints() == []
    run.checkpoints.mkdir()
    for step in (2, 10, 9):
        run.checkpoint(step).touch()
    (run.checkpoints / "step=11.safetensors.part").touch()  # a save that was killed
    (run.checkpoints / "step=best.safetensors").touch()
    assert [step_of(path) for path in run.known_checkpoints()] == [10, 9, 2]
