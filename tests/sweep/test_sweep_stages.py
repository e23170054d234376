"""What a sweep runs, skips and resumes, and in which order: no run is trained here."""

import json
import math
import shutil
from pathlib import Path

import pytest
import yaml
from support import refuses, run_folders, summary
from sweeping import Launcher, sweep

from gptattn.compare.finished_runs import read_runs
from gptattn.errors import SweepError
from gptattn.runs.folder import RunFolder
from gptattn.runs.two_stages import FirstStage
from gptattn.settings.config import TrainConfig
from gptattn.settings.identity import resume_provenance

HOME = Path("outputs", "scratch")
FIRST = "seed=1,2,3,4,5"
TUNE = {"lr": [1e-3, 2e-3], "seed": 0}


def spread(width: float, unlucky: tuple[tuple[str, int], ...] = ()) -> Launcher:
    """Losses whose differences to mha have the deviation `width`; some runs fail."""
    deviations = {1: -1.0, 2: -0.5, 3: 0.0, 4: 0.5, 5: 1.0}

    def outcome(cfg: TrainConfig) -> float | int:
        if (cfg.variant, cfg.seed) in unlucky:
            return 1
        own = width / 0.7906 * deviations.get(cfg.seed, 0.0)
        return 2.0 + {"mha": 0.0, "gqa": own, "mqa": own / 100}.get(cfg.variant, own)

    return Launcher(outcome)


def seeds_of(folder: Path) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for run in run_folders(folder / HOME):
        found.setdefault(summary(run)["variant"], []).append(summary(run)["seed"])
    return {variant: sorted(seeds) for variant, seeds in found.items()}


# Grids


def test_every_variant_of_a_seed_runs_before_the_next_seed(tmp_path, capfd):
    launcher = Launcher(lambda cfg: 2.0)
    sweep(tmp_path, launcher, "attn=mha,gqa", "seed=2,1")
    assert launcher.launched == [("mha", 1), ("gqa", 1), ("mha", 2), ("gqa", 2)]
    out = capfd.readouterr().out
    assert out.startswith("planning 4 runs\nsweep  4 runs, in outputs/scratch\n4 to run, 2 at")


def test_the_same_command_again_does_nothing_and_fresh_runs_all_again(tmp_path, capfd):
    launcher = Launcher(lambda cfg: 2.0)
    for more in ([], [], ["sweep.fresh=true"]):
        sweep(tmp_path, launcher, "attn=mha", *more)
    assert launcher.launched == [("mha", 1)] * 2
    assert "1 run, 1 already done" in capfd.readouterr().out


def test_what_depends_on_a_rate_is_planned_as_it_is_trained(tmp_path):
    launcher = Launcher(lambda cfg: 2.0)
    for _ in range(2):
        sweep(tmp_path, launcher, "optim.weight_decay=${.lr}", "optim.lr=1e-3,2e-3")
        assert len(launcher.launched) == 2


@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [(5, 5, "it is unlucky"), (RuntimeError("no worker"), 1, "no worker")],
)
def test_a_failing_run_or_launcher_costs_only_that_run_and_is_retried(
    fault, code, said, tmp_path, capfd
):
    unlucky = Launcher(lambda cfg: fault if cfg.variant == "gqa" else 2.0)
    with refuses("sweep: 1 of 2", code):
        sweep(tmp_path, unlucky, "attn=mha,gqa")
    assert said in capfd.readouterr().out
    assert seeds_of(tmp_path) == {"mha": [1]}
    lucky = Launcher(lambda cfg: 2.0)
    sweep(tmp_path, lucky, "attn=gqa,mha")
    assert lucky.launched == [("gqa", 1)]


def test_a_stopped_sweep_says_how_far_it_is(tmp_path, capfd):
    launcher = Launcher(lambda cfg: KeyboardInterrupt() if cfg.seed == 2 else 2.0)
    with pytest.raises(KeyboardInterrupt):
        sweep(tmp_path, launcher, "attn=mha,gqa", "seed=1,2")
    assert capfd.readouterr().err.startswith("stopped: 2 of 4 runs are done; ")


def test_other_code_text_and_settings_make_new_runs_and_name_the_old(tmp_path, capfd):
    launcher = Launcher(lambda cfg: 2.0)
    sweep(tmp_path, launcher, "attn=mha")
    (old,) = run_folders(tmp_path)
    making = (old / "identity.json").read_text()
    for key, value, said in (
        ("code", {"gptattn.model.gpt": "0"}, "different code in gptattn."),
        ("text", "0", "different text"),
    ):
        (old / "identity.json").write_text(json.dumps(json.loads(making) | {key: value}))
        launcher.launched.clear()
        sweep(tmp_path, launcher, "attn=mha", "sweep.keep_stale=true")
        assert launcher.launched == []
        sweep(tmp_path, launcher, "attn=mha")
        assert launcher.launched == [("mha", 1)]
        out = capfd.readouterr().out
        assert all(words in out for words in (said, old.name, "stale"))
        assert "sweep.keep_stale=true" in out
        (new,) = {*run_folders(tmp_path)} - {old}
        shutil.rmtree(new)
    (old / "identity.json").write_text(making)
    launcher.launched.clear()
    sweep(tmp_path, launcher, "attn=mha", "log_every=7", "sample.tokens=1")  # changes no result
    assert launcher.launched == []
    sweep(tmp_path, launcher, "attn=mha", "batch_size=2")
    assert launcher.launched == [("mha", 1)]


def test_a_run_that_was_begun_is_resumed_unless_it_would_fail_again(tmp_path, capfd):
    sweep(tmp_path, Launcher(lambda cfg: 2.0), "attn=mha")
    (run,) = run_folders(tmp_path)
    (run / "summary.json").unlink()

    def again() -> Launcher:
        launcher = Launcher(lambda cfg: 1)
        with pytest.raises(SweepError):
            sweep(tmp_path, launcher, "attn=mha")
        for other in {*(tmp_path / HOME).glob("mha*")} - {run}:
            shutil.rmtree(other)
        return launcher

    assert again().resumed == []  # it has no checkpoint
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "step=1.safetensors").touch()
    for code, resumes in ((3, False), (137, True)):
        RunFolder(run).write_failure(code, "why")
        assert again().resumed == [run.name] * resumes, code
    assert "1 run, 1 to resume" in capfd.readouterr().out


def test_a_run_that_was_extended_is_done_as_its_first_budget_made_it(tmp_path):
    launcher = Launcher(lambda cfg: 2.0)
    sweep(tmp_path, launcher, "attn=mha")
    extend(run_folders(tmp_path)[0])
    sweep(tmp_path, launcher, "attn=mha")
    assert launcher.launched == [("mha", 1)]
    sweep(tmp_path, launcher, "attn=mha", "budget.steps=2")  # one schedule, which nobody ran
    assert launcher.launched == [("mha", 1)] * 2


def extend(run: Path) -> None:
    """Write the record that `resume=RUN budget.steps=2` leaves."""
    folder = RunFolder(run)
    made = folder.read_provenance()
    assert made is not None
    folder.write_provenance(resume_provenance(made, made, 1, "1 steps"))
    settings = yaml.safe_load((run / "config.yaml").read_text())
    settings["budget"]["steps"] = 2
    (run / "config.yaml").write_text(yaml.safe_dump(settings))


def test_grouped_overrides_are_variants_and_equal_runs_count_once(tmp_path):
    launcher = Launcher(lambda cfg: 2.0)
    both = ["attn=mha", "attn=mha position=rope", "attn=mqa part=[sink, gate]"]
    sweep(tmp_path, launcher, "block=llama", variants=both)
    assert launcher.launched == [("mha", 1), ("mqa+sink+gate", 1)]


# A learning rate for each variant


def test_each_variant_runs_at_the_rate_with_its_lowest_loss(tmp_path, capfd):
    best = {"mha": 2e-3, "gqa": 1e-3}
    launcher = Launcher(lambda cfg: 1.0 if cfg.optim.lr == best[cfg.variant] else 1.5)
    sweep(tmp_path, launcher, "attn=mha,gqa", tune=TUNE)
    home = tmp_path / HOME
    runs = [run for run in run_folders(home) if run.parent == home]
    found = [RunFolder(run).read_settings() for run in runs]
    assert {s["choices"]["attn"]: s["optim"]["lr"] for s in found} == best
    assert len(list((home / "tuning").glob("*/summary.json"))) == 4
    assert "attn=mha 0.002 is best (0.001: 1.5000, 0.002: 1.0000)" in capfd.readouterr().out
    launcher.outcome = lambda cfg: 0.9 if cfg.variant == "mha" else 1.5
    sweep(tmp_path, launcher, "attn=mha,gqa", tune=TUNE | {"lr": [1e-3, 2e-3, 4e-3]})
    (left_out,) = (run for run in runs if RunFolder(run).replaced)
    assert RunFolder(left_out).read_settings()["optim"]["lr"] == 2e-3


@pytest.mark.slow
def test_trials_can_use_a_share_of_the_budget_and_extend_the_rates(tmp_path):
    """The losses are parabolas with their lowest points at these rates, whatever the budget."""
    best = {"mha": 7e-3, "gqa": 4.2e-3}
    launcher = Launcher(lambda cfg: 1 + math.log(cfg.optim.lr / best[cfg.variant]) ** 2)
    tune = TUNE | {"budget": 0.5, "refine": True, "scale": 0.5}
    for _ in range(2):
        sweep(tmp_path, launcher, "attn=mha,gqa", "budget.steps=8", tune=tune)
    trials = [RunFolder(run).read_settings() for run in run_folders(tmp_path / HOME / "tuning")]
    rates = {variant: set[tuple[float, int]]() for variant in best}
    for one in trials:
        rates[one["choices"]["attn"]].add((one["optim"]["lr"], one["budget"]["steps"]))
    tried = [1e-3, 2e-3, 4e-3, 8e-3, 16e-3]
    assert rates["mha"] == {(rate, 4) for rate in tried}
    assert rates["gqa"] == {(rate, 4) for rate in tried[:4]}
    compared = [run for run in run_folders(tmp_path) if run.parent.name == "scratch"]
    found = [RunFolder(run).read_settings() for run in compared]
    assert {(s["choices"]["attn"], s["budget"]["steps"], s["optim"]["lr"]) for s in found} == {
        (variant, 8, rate / 2) for variant, rate in best.items()
    }
    assert len(launcher.launched) == len(trials) + 2


def test_a_variant_waits_for_a_failed_trial_and_loses_a_diverged_one(tmp_path, capfd):
    def outcome(cfg: TrainConfig) -> float | int:
        if cfg.optim.lr == 2e-3:
            return {"mha": 5, "gqa": 1}[cfg.variant]
        return 1.5

    launcher = Launcher(outcome)
    with refuses("sweep: 1 of 5", 1):
        sweep(tmp_path, launcher, "attn=mha,gqa", tune=TUNE)
    assert launcher.launched[4:] == [("mha", 1)]
    out = capfd.readouterr().out
    assert "attn=mha 0.001 is best (0.001: 1.5000, 0.002: diverged), the lowest" in out
    assert "attn=gqa skipped: some trials" in out


def test_a_variant_that_diverges_at_every_rate_ends_the_sweep_with_that(tmp_path):
    launcher = Launcher(lambda cfg: 5)
    for _ in range(2):
        with refuses("sweep: diverged", 5):
            sweep(tmp_path, launcher, "attn=gqa", tune=TUNE)
    assert len(launcher.launched) == 2  # what has diverged is not tried again


# Until it is decided


@pytest.mark.slow
def test_each_variant_gets_the_seeds_it_needs_and_the_baseline_the_most(tmp_path, capfd):
    launcher = spread(0.02)
    sweep(tmp_path, launcher, "attn=mha,gqa,mqa", FIRST, "sweep.until=0.025")
    found = seeds_of(tmp_path)
    assert found["mqa"] == [1, 2, 3, 4, 5]
    # By hand: t of 4 degrees at 0.025 / 2 is 3.495; (3.495 * 0.02 / 0.025) ** 2 = 7.8.
    assert found["mha"] == found["gqa"] == [1, 2, 3, 4, 5, 6, 7, 8]
    stages = {run.stage for run in read_runs([tmp_path / HOME])[0]}
    assert stages == {FirstStage((1, 2, 3, 4, 5), 0.025)}
    assert "gqa needs 8 seeds" in capfd.readouterr().out


@pytest.mark.slow
def test_a_second_stage_never_passes_for_a_first(tmp_path):
    """Nor when the sweep was killed in its second stage, and is typed with all those seeds."""
    launcher = spread(0.02)
    real = launcher.outcome
    launcher.outcome = lambda cfg: KeyboardInterrupt() if cfg.seed == 7 else real(cfg)
    given = ("attn=mha,gqa", "sweep.until=0.022")
    with pytest.raises(KeyboardInterrupt):
        sweep(tmp_path, launcher, *given, FIRST)
    launcher.outcome = real
    sweep(tmp_path, launcher, *given, "seed=1,2,3,4,5,6")
    assert {run.stage for run in read_runs([tmp_path / HOME])[0]} == {
        FirstStage((1, 2, 3, 4, 5), 0.022)
    }
    done = seeds_of(tmp_path)
    assert done["mha"] == done["gqa"] == [1, 2, 3, 4, 5, 6, 7]
    with refuses("*: seed=1,2,3,4,5"):
        sweep(tmp_path, launcher, *given, "seed=2,3,4,5,6")
    for run in run_folders(tmp_path):  # one that was extended counts as it was at first
        extend(run)
    sweep(tmp_path, launcher, *given, FIRST)
    assert seeds_of(tmp_path) == done


@pytest.mark.slow
def test_what_needs_more_than_max_seeds_is_not_begun(tmp_path, capfd):
    launcher = spread(0.02)
    sweep(tmp_path, launcher, "attn=mha,gqa", FIRST, "sweep.until=0.005", "sweep.max_seeds=9")
    assert len(launcher.launched) == 10
    assert "gqa: ±0.005 needs about 124 seeds" in capfd.readouterr().out


@pytest.mark.slow
def test_a_variant_missing_first_seeds_gets_no_more_and_others_continue(tmp_path, capfd):
    launcher = spread(0.02, unlucky=(("mqa", 3), ("gqa", 7)))
    with refuses("sweep: 2 of 21", 1):
        sweep(tmp_path, launcher, "attn=mha,gqa,mqa", FIRST, "sweep.until=0.025")
    assert seeds_of(tmp_path)["mqa"] == [1, 2, 4, 5]
    assert seeds_of(tmp_path)["mha"] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert "mqa: no seeds added" in capfd.readouterr().out
