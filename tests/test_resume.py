"""A run that was stopped, or died, goes on as if nothing had happened."""

import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from support import command, rows, series, summary, tiny, train
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tortures.bench import fingerprint
from tortures.stops import WAYS, damage

from gptattn.checkpoint import known_checkpoints, read_checkpoint
from gptattn.compose import CONF
from gptattn.errors import CheckpointError
from gptattn.lock import locked_run
from gptattn.module import LanguageModel
from gptattn.saved import load_run
from gptattn.saving import generator_states, restore_generators

VARIANTS = sorted(file.stem for file in (CONF / "attn").glob("*.yaml"))
# Validations after steps 2, 4 and 6, rows after each third: they do not fall together.
SIX = (
    "budget.steps=6",
    "validation.count=3",
    "log_every=3",
    "accumulate=2",
    "model.dropout=0.2",
    "hydra.run.dir=run",
)


def begun(folder: Path, *overrides: str) -> list[str]:
    return tiny(folder, *SIX, *overrides)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The fingerprint of a run of the variant that nothing has disturbed."""
    known: dict[str, str] = {}

    def of(variant: str) -> str:
        if variant not in known:
            folder = tmp_path_factory.mktemp(variant)
            known[variant] = fingerprint(train(folder, *SIX, f"attn={variant}"))
        return known[variant]

    return of


def once(
    monkeypatch: pytest.MonkeyPatch, method: str, step: int, act: Callable[[], object]
) -> None:
    """Do something at the beginning of the method, the first time after `step` whole steps."""
    original, left = getattr(LanguageModel, method), [act]

    def wrapped(self: LanguageModel, *args: Any) -> Any:
        if self.global_step == step and left:
            left.pop()()
        return original(self, *args)

    monkeypatch.setattr(LanguageModel, method, wrapped)


def crash() -> NoReturn:
    raise AssertionError("the run dies here")


def sent(number: int) -> Callable[[], None]:
    return lambda: signal.raise_signal(number)


def names(run: Path) -> list[str]:
    return sorted(file.name for file in (run / "checkpoints").iterdir())


def steps_kept(run: Path) -> list[str]:
    return [path.name for path in known_checkpoints(run / "checkpoints")]


# Exactness


def test_the_fingerprint_sees_one_bit_of_a_weight_and_one_row(tmp_path: Path) -> None:
    run = train(tmp_path, *SIX)
    before = fingerprint(run)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:-2] + lines[-1:]))
    assert fingerprint(run) != before
    (run / "metrics.jsonl").write_text("".join(lines))
    assert fingerprint(run) == before
    newest = known_checkpoints(run / "checkpoints")[0]
    content = read_checkpoint(newest)
    next(iter(content["state_dict"].values())).view(torch.int32).flatten()[0] ^= 1
    torch.save(content, newest)
    newest.with_name(newest.name + ".sha256").unlink()
    assert fingerprint(run) != before


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_that_died_goes_on_bit_for_bit(
    variant: str, whole: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    once(monkeypatch, "training_step", 3, crash)
    assert command(tmp_path, *begun(tmp_path, f"attn={variant}")) == 1
    assert steps_kept(run) == ["step=2.ckpt"]
    assert series(run, "train/loss")[-1][0] == 3
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "time": 0.0, "train/loss": 9.9}\n{"step": 3, "ti')
    assert command(tmp_path, "resume=run") == 0
    assert fingerprint(run) == whole(variant)
    assert summary(run)["steps"] == 6
    assert names(run) == [
        "step=4.ckpt",
        "step=4.ckpt.sha256",
        "step=6.ckpt",
        "step=6.ckpt.sha256",
    ]


STOPS = [
    ("training_step", 0, signal.SIGTERM),
    ("training_step", 1, signal.SIGTERM),  # with a validation to come
    ("training_step", 2, signal.SIGINT),
    ("training_step", 5, signal.SIGTERM),  # the last
    ("validation_step", 4, signal.SIGINT),
    ("validation_step", 6, signal.SIGTERM),  # the last
]


@pytest.mark.parametrize(("method", "step", "number"), STOPS)
def test_a_run_that_was_stopped_saves_and_goes_on_bit_for_bit(
    method: str,
    step: int,
    number: int,
    whole: Callable[[str], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    taken = step + (method == "training_step")
    once(monkeypatch, method, step, sent(number))
    assert command(tmp_path, *begun(tmp_path, "attn=gqa")) == 128 + number
    err = capfd.readouterr().err
    assert f"run holds step {taken}; python train.py resume=run goes on" in err
    assert "Traceback" not in err
    assert steps_kept(run)[0] == f"step={taken}.ckpt"
    assert not (run / "summary.json").exists()
    assert command(tmp_path, "resume=run") == 0
    assert fingerprint(run) == whole("gqa")


def test_a_run_that_was_stopped_twice_in_a_row_goes_on_bit_for_bit(
    whole: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once(monkeypatch, "training_step", 3, sent(signal.SIGTERM))
    assert command(tmp_path, *begun(tmp_path)) == 143
    # At its first validation batch the resumed run has taken no step yet.
    once(monkeypatch, "validation_step", 4, sent(signal.SIGTERM))
    assert command(tmp_path, "resume=run") == 143
    once(monkeypatch, "training_step", 4, crash)
    assert command(tmp_path, "resume=run") == 1
    assert command(tmp_path, "resume=run") == 0
    assert fingerprint(tmp_path / "run") == whole("mha")


def test_a_second_ctrl_c_ends_a_run_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    once(monkeypatch, "training_step", 3, twice)
    assert command(tmp_path, *begun(tmp_path)) == 130
    assert steps_kept(tmp_path / "run") == ["step=2.ckpt"]
    assert "Ctrl-C again ends it now" in capfd.readouterr().err


def test_without_a_checkpoint_yet_a_run_begins_again(
    whole: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once(monkeypatch, "training_step", 1, crash)
    assert command(tmp_path, *begun(tmp_path)) == 1
    assert command(tmp_path, "resume=run") == 0
    assert fingerprint(tmp_path / "run") == whole("mha")


def test_a_run_that_died_before_its_summary_gets_one(
    whole: Callable[[str], str], tmp_path: Path
) -> None:
    run = train(tmp_path, *SIX)
    result = summary(run)["metrics"]
    (run / "summary.json").unlink()
    assert command(tmp_path, "resume=run") == 0
    assert fingerprint(run) == whole("mha")
    assert summary(run)["metrics"]["val/loss"] == result["val/loss"]
    assert summary(run)["metrics"]["train/loss"] == result["train/loss"]


def test_tensorboard_shows_each_point_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    once(monkeypatch, "training_step", 3, crash)
    assert command(tmp_path, *begun(tmp_path, "log_every=1")) == 1
    assert command(tmp_path, "resume=run") == 0
    events = EventAccumulator(str(tmp_path / "run"), size_guidance={"scalars": 0}).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]
    assert [event.step for event in events.Scalars("val/loss")] == [2, 4, 6]
    assert [event.step for event in events.Scalars("cost/params")] == [0]


def test_all_generators_go_on_where_they_were() -> None:
    def draw() -> tuple[float, ...]:
        return random.random(), float(np.random.random()), torch.rand(()).item()

    draw()
    states = generator_states()
    drawn = draw()
    assert draw() != drawn
    restore_generators(states)
    assert draw() == drawn


# What may change


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home of a run of which the checkpoint after its second step is left."""
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.MonkeyPatch.context() as patch:
        once(patch, "training_step", 2, sent(signal.SIGTERM))
        assert command(folder, *begun(folder)) == 143
    return folder


def content(folder: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


REFUSED = {
    "seed=2": "seed: is 1 in this run, and 2 would make it another",
    "batch_size=8": "batch_size: is 4 in this run",
    "model.d_model=32": "model.d_model: is 16 in this run",
    "model=nano": "model: is tiny in this run",
    "attn=mqa": "attn: is mha in this run",
    "tokenizer=char": "tokenizer: is byte in this run",
    "data=pydocs": "data: is text in this run",
    "optim.lr=1": "optim.lr: is 0.002 in this run",
    "trainer.threads=2": "trainer.threads: is 1 in this run",
    "validation.fraction=0.2": "validation.fraction: is 0.1 in this run",
    "hydra.run.dir=other": "hydra.run.dir: is settled",
    "sed=2": "sed: is no setting; did you mean seed?",
    "seed=1,2": "seed: a run that goes on takes name=value alone",
    "+seed=1": "seed: a run that goes on takes name=value alone",
    "budget.steps=2": "budget: comes to 2 steps, and 3 are taken",
    "budget.steps=many": "budget.steps: ",
}


@pytest.mark.parametrize("override", REFUSED)
def test_a_change_that_would_make_another_run_is_refused(
    override: str, stopped: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = content(stopped / "run")
    assert command(stopped, "resume=run", override) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"error: {REFUSED[override]}")
    assert content(stopped / "run") == before


def test_another_text_in_its_place_is_refused(
    stopped: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = stopped / "text.txt"
    original = text.read_text(encoding="utf-8")
    text.write_text(original.replace("Line 003", "Line 300"), encoding="utf-8")
    try:
        assert command(stopped, "resume=run") == 2
    finally:
        text.write_text(original, encoding="utf-8")
    assert capfd.readouterr().err.startswith("error: data: the text has changed since the run")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["resume=none"], 4, "error: run: none holds no run"),
        (["resume="], 2, "error: resume: takes one run folder"),
        (["resume=run", "resume=run"], 2, "error: resume: takes one run folder"),
        (["resume=run", "-m"], 2, "error: resume: goes on with one run"),
    ],
)
def test_what_is_no_run_cannot_go_on(
    arguments: list[str],
    code: int,
    said: str,
    stopped: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert command(stopped, *arguments) == code
    assert capfd.readouterr().err.startswith(said)
    assert not (stopped / "none").exists()


def test_a_finished_run_is_left_alone_and_goes_on_with_a_larger_budget(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = train(tmp_path, *SIX)
    before = content(run)
    assert command(tmp_path, "resume=run", "seed=1", "trainer=cpu", "trainer.threads=1") == 0
    assert "done already, after 6 steps; a larger budget goes on" in capfd.readouterr().out
    assert content(run) == before
    # The text may have moved; what it holds is what counts.
    (tmp_path / "text.txt").rename(tmp_path / "moved.txt")
    moved = f"data.path={tmp_path / 'moved.txt'}"
    assert command(tmp_path, "resume=run", "budget.steps=8", "validation.count=2", moved) == 0
    assert summary(run)["steps"] == 8
    assert [step for step, _ in series(run, "train/loss")] == [1, 2, 3, 4, 6, 8]
    assert [step for step, _ in series(run, "val/loss")] == [2, 4, 6, 8]
    assert "steps: 8" in (run / "config.yaml").read_text()


def test_a_run_that_kept_no_checkpoints_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, *SIX, "checkpoint=false")
    assert command(tmp_path, "resume=run") == 4
    assert "checkpoint=false" in capfd.readouterr().err


# Damage


@pytest.mark.parametrize("way", range(len(WAYS)), ids=WAYS)
def test_a_damaged_newest_checkpoint_costs_one_interval(
    way: int,
    whole: Callable[[str], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    once(monkeypatch, "training_step", 5, crash)
    assert command(tmp_path, *begun(tmp_path)) == 1
    assert steps_kept(run) == ["step=4.ckpt", "step=2.ckpt"]
    damage(run / "checkpoints" / "step=4.ckpt", way, random.Random(way))
    capfd.readouterr()
    capfd.readouterr()
    assert load_run(run).source == run / "checkpoints" / "step=2.ckpt"
    (warning,) = capfd.readouterr().err.splitlines()
    assert warning.startswith("warning: checkpoint: step=4.ckpt ")
    assert warning.endswith("checkpoints/step=2.ckpt is used instead")
    assert command(tmp_path, "resume=run") == 0
    out, err = capfd.readouterr()
    assert err.splitlines() == [warning.replace(f"{run}", "run")]
    assert "goes on after step 2" in out
    assert fingerprint(run) == whole("mha")


def test_with_no_good_checkpoint_a_run_does_not_go_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = train(tmp_path, *SIX)
    for path in known_checkpoints(run / "checkpoints"):
        damage(path, 1, random.Random(0))
    before = content(run)
    capfd.readouterr()
    assert command(tmp_path, "resume=run") == 4
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: checkpoint: none in run/checkpoints is good (step=6.ckpt is dam")
    assert "step=4.ckpt is damaged" in line
    assert content(run) == before
    with pytest.raises(CheckpointError, match="none in"):
        load_run(run)


def test_what_a_killed_save_has_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    once(monkeypatch, "training_step", 3, crash)
    assert command(tmp_path, *begun(tmp_path)) == 1
    # As a kill between the sum and the new name leaves it.
    (run / "checkpoints" / "step=4.ckpt.123.part").write_bytes(b"whole, but without its name")
    (run / "checkpoints" / "step=4.ckpt.sha256").write_text(f"{'0' * 64}  step=4.ckpt\n")
    (run / "summary.json.123.part").write_text("{")
    capfd.readouterr()
    assert command(tmp_path, "resume=run") == 0
    assert capfd.readouterr().err == ""
    assert not list(run.rglob("*.part"))
    assert steps_kept(run) == ["step=6.ckpt", "step=4.ckpt"]


def test_what_a_start_left_that_was_killed_at_once_is_removed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml.123.part").write_text("seed: ")
    assert command(tmp_path, *begun(tmp_path)) == 0
    assert not list(run.rglob("*.part"))


# NaN and Inf


def test_a_weight_that_is_not_finite_reaches_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    validation_epoch_end = LanguageModel.on_validation_epoch_end

    def poisoned(self: LanguageModel) -> None:
        validation_epoch_end(self)
        if self.global_step == 4:
            with torch.no_grad():
                next(self.model.parameters()).view(-1)[3] = float("inf")

    monkeypatch.setattr(LanguageModel, "on_validation_epoch_end", poisoned)
    assert command(tmp_path, *begun(tmp_path, "sample.tokens=0")) == 5
    line = capfd.readouterr().err.splitlines()[-1]
    assert line.startswith("error: weight model.")
    assert "is not finite after step 4" in line
    assert steps_kept(tmp_path / "run") == ["step=2.ckpt"]


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_stops_the_run_at_its_step(
    number: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    before_step = LanguageModel.on_before_optimizer_step

    def poisoned(self: LanguageModel, optimizer: torch.optim.Optimizer) -> None:
        gradient = next(self.model.parameters()).grad
        assert gradient is not None
        if self.global_step == 3:
            gradient.view(-1)[1] = number
        before_step(self, optimizer)

    monkeypatch.setattr(LanguageModel, "on_before_optimizer_step", poisoned)
    assert command(tmp_path, *begun(tmp_path)) == 5
    assert f"error: train/grad_norm: is {number} at step 4" in capfd.readouterr().err
    assert steps_kept(tmp_path / "run") == ["step=2.ckpt"]


# Two writers


def test_a_run_that_is_written_is_not_resumed_by_another(
    stopped: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with locked_run(stopped / "run", "test"):
        before = content(stopped / "run")
        assert command(stopped, "resume=run") == 6
        assert content(stopped / "run") == before
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"error: resume: process {os.getpid()} is writing to run; ")


@pytest.mark.parametrize("begun_already", [True, False])
def test_a_second_start_in_a_folder_writes_nothing(
    begun_already: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    with locked_run(run, "test"):
        if begun_already:
            (run / "config.yaml").write_text("seed: 1\n")
        before = content(run)
        assert command(tmp_path, *begun(tmp_path, "seed=2")) == 6
        assert content(run) == before
        assert not (run / ".hydra").exists()
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"error: hydra.run.dir: process {os.getpid()} is writing to run; ")


def test_rows_before_the_checkpoint_that_are_gone_are_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    once(monkeypatch, "training_step", 3, crash)
    assert command(tmp_path, *begun(tmp_path)) == 1
    file = tmp_path / "run" / "metrics.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    file.write_text("".join(lines[:1]), encoding="utf-8")
    capfd.readouterr()
    assert command(tmp_path, "resume=run") == 0
    (warning,) = capfd.readouterr().err.splitlines()
    assert warning.startswith("warning: metrics.jsonl: ")
    assert warning.endswith("rows are missing, which were written before step 2")
    assert all(json.loads(line) for line in file.read_text(encoding="utf-8").splitlines())
    assert [row["step"] for row in rows(tmp_path / "run") if "val/loss" in row] == [4, 6]


def test_a_run_with_a_package_of_the_users_own_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_attention.py").write_text(
        "from gptattn.attention import MultiHeadAttention\n\n"
        "class Mine(MultiHeadAttention):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    own = ("attn._target_=my_attention.Mine", "allow_targets=[my_attention]")
    run = train(tmp_path, *SIX, *own)
    assert command(tmp_path, f"resume={run}", "budget.steps=8") == 2
    line = capfd.readouterr().err.splitlines()[-1]
    assert line.startswith("error: run: ")
    assert "my_attention.Mine is outside of gptattn.attention" in line
    assert "allow_targets" in line
    assert command(tmp_path, f"resume={run}", "budget.steps=8", "allow_targets=[os]") == 2
    assert command(tmp_path, f"resume={run}", "budget.steps=8", own[1]) == 0
    assert summary(run)["steps"] == 8


# Ways of training


@pytest.mark.parametrize(
    "how",
    [
        ["accumulate=1"],
        ["trainer.precision=bf16-mixed"],
        ["trainer.precision=64-true", "position=rope"],
        ["attn=mqa", "match=flops", "tokenizer=char"],
        ["attn.backend=reference", "loss_chunk_tokens=7", "log_every=1"],
    ],
)
def test_other_ways_of_training_go_on_bit_for_bit_too(
    how: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(tmp_path / "whole", *SIX, *how)
    once(monkeypatch, "training_step", 3, crash)
    assert command(tmp_path, *begun(tmp_path, *how)) == 1
    assert command(tmp_path, "resume=run") == 0
    assert fingerprint(tmp_path / "run") == fingerprint(whole)


def test_a_budget_in_seconds_goes_on_counting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = ("budget.steps=null", "budget.seconds=0.2", "log_every=1")
    once(monkeypatch, "training_step", 3, sent(signal.SIGTERM))
    assert command(tmp_path, *begun(tmp_path, *seconds)) == 143
    before = dict(series(tmp_path / "run", "progress/seconds"))[3]
    assert command(tmp_path, "resume=run") == 0
    after = [value for _, value in series(tmp_path / "run", "progress/seconds")]
    assert after == sorted(after)
    assert before < 0.2 <= after[-1]
