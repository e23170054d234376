"""`trainer.precision=auto` is replaced before a run begins; a hint is measured only where cheap."""

import math
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from building import settings
from rich.console import Console
from support import command, config, losses, process_state, tiny, train

from gptattn.runs.folder import RunFolder
from gptattn.settings.identity import settings_key
from gptattn.training import precision as module
from gptattn.training.precheck import check_run
from gptattn.training.precision import hint, step_seconds
from gptattn.training.train import train_ready

AUTO = "trainer.precision=auto"
SIZES = ("model.num_layers=1", "model.d_model=12", "model.num_heads=3", "model.context_length=7")


def takes(monkeypatch: pytest.MonkeyPatch, wide: float, half: float) -> list[str]:
    """Let a step take these seconds in 32-true and bf16-mixed; return the list of calls."""
    asked: list[str] = []

    def seconds(cfg: object, vocab_size: int, seconds: float = 1.0) -> list[float]:
        asked.append(f"{vocab_size}")
        return [wide, half]

    monkeypatch.setattr(module, "step_seconds", seconds)
    return asked


@pytest.mark.parametrize(
    ("half", "expected"), [(1.0, "bf16-mixed"), (2.5, "32-true"), (math.inf, "32-true")]
)
def test_auto_takes_the_faster_and_the_record_says_that_it_chose(
    half: float,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    asked = takes(monkeypatch, 2.0, half)
    run = train(tmp_path / "auto", AUTO)
    said = capfd.readouterr().out
    times = f"a step in bf16-mixed is {2 / half:.1f} times"
    why = "this model cannot compute in bf16-mixed" if half == math.inf else times
    assert f"trainer.precision=auto: {expected}; {why}" in said
    recorded = config(run)
    assert recorded["trainer"]["precision"] == expected
    assert recorded["trainer"]["auto_precision"] is True
    assert asked == ["256"]
    # Once chosen it is the run's own: another machine that resumes it does not choose again.
    takes(monkeypatch, half, 2.0)
    assert command(tmp_path / "auto", f"resume={run}", "budget.steps=6") == 0
    assert config(run)["trainer"]["precision"] == expected
    explicit = recorded | {"trainer": recorded["trainer"] | {"auto_precision": False}}
    assert settings_key(recorded) == settings_key(explicit)
    other = recorded | {"trainer": recorded["trainer"] | {"precision": "64-true"}}
    assert settings_key(recorded) != settings_key(other)


def test_auto_changes_no_number_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = train(tmp_path / "wide")
    real = step_seconds

    def never_half(*args: object, **more: float) -> list[float]:
        wide, _ = real(*args, seconds=0.0)  # type: ignore[arg-type]
        return [wide, math.inf]

    monkeypatch.setattr(module, "step_seconds", never_half)
    chosen = train(tmp_path / "auto", AUTO)
    assert losses(chosen) == losses(wide)


def test_a_trial_times_both_and_a_model_that_fails_in_bfloat16_gets_infinity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cfg = settings(*SIZES, "batch_size=5", "trainer=cpu", "trainer.threads=1")
    assert all(0 < seconds < 10 for seconds in step_seconds(cfg, 13, seconds=0.0))

    def fails(*_: object, **__: object) -> torch.Tensor:
        if torch.is_autocast_enabled("cpu"):
            raise RuntimeError("expected scalar type Float but found BFloat16")
        return torch.zeros((), requires_grad=True)

    monkeypatch.setattr("gptattn.model.gpt.GPT.loss", fails)
    wide, half = step_seconds(cfg, 13, seconds=0.0)
    assert 0 < wide < half == math.inf


def test_a_trial_multiplies_float32_matrices_as_the_run_would(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: set[str] = set()

    def noted(*_: object, **__: object) -> torch.Tensor:
        seen.add(torch.get_float32_matmul_precision())
        return torch.zeros((), requires_grad=True)

    monkeypatch.setattr("gptattn.model.gpt.GPT.loss", noted)
    cfg = settings(*SIZES, "trainer=cpu", "trainer.threads=1", "trainer.matmul_precision=high")
    step_seconds(cfg, 13, seconds=0.0)
    assert seen == {"high"}
    assert torch.get_float32_matmul_precision() == "highest"


def rates(monkeypatch: pytest.MonkeyPatch, half: float) -> None:
    rate = {torch.float32: 1.0, torch.bfloat16: half}
    monkeypatch.setattr(module, "matmul_flops_per_second", lambda device, dtype, n: rate[dtype])


def test_a_hint_for_a_long_run_that_would_be_much_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = settings(*SIZES, "trainer=cpu")
    rates(monkeypatch, 3.0)
    takes(monkeypatch, 2.0, 1.25)
    assert hint(cfg, 13, 1000).startswith(
        "hint: trainer.precision=bf16-mixed would be about 1.6 times as fast here"
    )
    takes(monkeypatch, 2.0, 1.4)
    assert hint(cfg, 13, 1000) == ""


@pytest.mark.parametrize(
    ("steps", "half", "trainer"),
    [
        (999, 3.0, {}),  # the trial would take more than a hundredth of the run
        (None, 3.0, {}),
        (1000, 1.4, {}),  # no instructions for bfloat16: the trial itself would be slow
        (1000, 3.0, {"precision": "bf16-true"}),
        (1000, 3.0, {"auto_precision": True}),
    ],
)
def test_no_step_is_tried_where_it_would_cost_time_or_tell_nothing(
    steps: int | None, half: float, trainer: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = settings(*SIZES, "trainer=cpu")
    cfg = replace(cfg, trainer=replace(cfg.trainer, **trainer))
    rates(monkeypatch, half)
    asked = takes(monkeypatch, 2.0, 1.0)
    assert hint(cfg, 13, steps) == ""
    assert asked == []


def test_a_run_alone_measures_for_a_hint_and_one_with_a_sweeps_log_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gptattn.training.train.hint", lambda *_: "hint: of the test")
    ready = check_run(settings(*tiny(tmp_path, "budget.steps=1", "sample.tokens=0")))
    alone, beside = tmp_path / "alone", tmp_path / "beside"
    beside.mkdir()
    RunFolder(beside).console_file.touch()
    for folder, told in ((alone, True), (beside, False)):
        console = Console(file=StringIO(), record=True)
        with process_state():
            train_ready(ready, folder, console)
        assert ("hint: of the test" in console.export_text()) == told
