"""Which settings may change when a run resumes, and which are refused."""

import pytest
from building import settings as cached_settings
from hydra import compose, initialize_config_dir
from interrupted import content
from support import TEXT, command, is_complaint, refuses, series, summary, tiny

from gptattn.runs.folder import RunFolder
from gptattn.settings.compose import CONF, resume_settings
from gptattn.settings.config import TrainConfig
from gptattn.settings.messages import explain_hydra_error
from gptattn.training.preflight import preflight

REFUSED = {
    "seed=2": "seed: fixed",
    "model=nano": "model: fixed",
    "trainer.threads=2": "trainer.threads: fixed",
    "attn.num_kv_heads=2": "attn.num_kv_heads: fixed",
    "pattern=[mqa,gqa]": "pattern: fixed",
    "sed=2": "sed: seed",
    "sample={tokens:1}": "sample: name=value",
    "+logger.csv.name=a": "logger.csv.name: name=value",
}


def resume(recorded: TrainConfig, given: list[str]) -> TrainConfig:
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        return resume_settings(recorded, given, compose("train", given))


@pytest.mark.parametrize("override", REFUSED)
def test_a_change_that_would_make_another_run_is_refused(override, tmp_path):
    with refuses(REFUSED[override]):
        try:
            resume(cached_settings(*tiny(tmp_path)), [override])
        except Exception as error:
            raise explain_hydra_error(error, [override], CONF) from error


def test_a_budget_in_another_unit_replaces_the_recorded_one(tmp_path):
    recorded = cached_settings(*tiny(tmp_path))
    found = resume(recorded, ["budget.tokens=500", "sample.tokens=1", "trainer.devices=2"])
    assert (found.budget.steps, found.budget.tokens) == (None, 500)
    assert (found.sample.tokens, found.trainer.devices) == (1, 2)
    assert found.attn == recorded.attn


def test_the_settings_of_the_first_command_may_stand_beside_resume(tmp_path):
    given = tiny(tmp_path, "attn=gqa", "seed=3", "part=[gate]", "pattern=null")
    recorded = cached_settings(*given)
    assert resume(recorded, given) == recorded


def test_fewer_steps_than_are_taken_are_refused(stopped, capfd):
    before = content(stopped / "run")
    assert command(stopped, "resume=run", "budget.steps=2") == 2
    assert is_complaint(capfd.readouterr().err, "budget: taken 3")
    assert content(stopped / "run") == before


def test_another_text_is_refused(stopped, tmp_path, capfd):
    (tmp_path / "other.txt").write_text(TEXT.replace("Line 003", "Line 300"), encoding="utf-8")
    assert command(stopped, "resume=run", f"data.path={tmp_path / 'other.txt'}") == 2
    assert is_complaint(capfd.readouterr().err, "data: has changed")


def test_a_finished_run_is_left_alone_and_goes_on_with_a_larger_budget(finished, tmp_path, capfd):
    run = finished
    before = content(run)
    assert command(tmp_path, "resume=run") == 0
    assert "already finished" in capfd.readouterr().out
    assert content(run) == before
    # The text may have moved: only its content counts.
    (tmp_path / "moved.txt").write_text(TEXT, encoding="utf-8")
    moved = f"data.path={tmp_path / 'moved.txt'}"
    assert command(tmp_path, "resume=run", "budget.steps=8", "validation.count=2", moved) == 0
    assert summary(run)["steps"] == 8
    assert [step for step, _ in series(run, "train/loss")] == [1, 2, 3, 4, 6, 8]
    assert [step for step, _ in series(run, "val/loss")] == [2, 4, 6, 8]
    assert "steps: 8" in (run / "config.yaml").read_text()


@pytest.mark.parametrize(
    ("own", "said"),
    [("checkpoint=false", "checkpoint=false"), ("checkpoint=true", "gone")],
)
def test_a_finished_run_without_checkpoints_is_not_resumed(own, said, tmp_path):
    cfg, run = cached_settings(*tiny(tmp_path, own)), RunFolder(tmp_path)
    run.write_settings(cfg)
    run.write_summary({"status": "done"})
    with refuses(f"resume: {said}", 4):
        preflight(cfg, run)
