"""`sweep.until`: more seeds until every interval is as narrow as asked."""

import json
import sys
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import yaml
from runfolders import write_run
from support import command, run_folders, summary, tiny

import gptattn.sweep.run_sweep
import gptattn.sweep.until
from gptattn.compare.comparison import compare
from gptattn.compare.finished_runs import read_runs
from gptattn.machine.lock import is_locked
from gptattn.runs.folder import RunFolder
from gptattn.runs.sweep_states import SWEEP_LOCK
from gptattn.runs.two_stages import FirstStage, TwoStages, write_two_stages
from gptattn.sweep.plan import Plan

UNLUCKY = {("mla", 3)}  # runs that fail


def arguments(folder: Path, *more: str, until: str = "0.02") -> list[str]:
    own = ["hydra/launcher=basic", "budget.steps=1", "sample.tokens=0", "validation.count=1"]
    sweep = ["checkpoint=false", "experiment_name=a", f"sweep.until={until}"]
    return ["-m", *tiny(folder, *own, *sweep, *more)]


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Runs end at once, with losses by seed and variant: what is asked is which of them run."""
    launches: list[tuple[str, int]] = []

    def launched(todo: Sequence[Plan], *_: object) -> tuple[list[object], dict[Path, str]]:
        failed: dict[Path, str] = {}
        for plan in todo:
            cfg, run = plan.cfg, RunFolder(plan.folder)
            launches.append((cfg.variant, cfg.seed))
            if launches[-1] in UNLUCKY:
                failed[plan.folder] = "it is unlucky"
                continue
            drawn = np.random.default_rng([cfg.seed, zlib.crc32(cfg.variant.encode())])
            loss = 2 + 0.02 * float(drawn.standard_normal())
            write_run(run.path, cfg.variant, cfg.seed, loss)
            assert plan.making is not None
            run.write_making(plan.making)
            run.write_settings(cfg)
        return [], failed

    monkeypatch.setattr(gptattn.sweep.run_sweep, "_launched", launched)
    return launches


def seeds_of(folder: Path) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for run in run_folders(folder):
        found.setdefault(summary(run)["variant"], []).append(summary(run)["seed"])
    return {variant: sorted(seeds) for variant, seeds in found.items()}


def extend(run: Path) -> None:
    """Write the record that `resume=RUN budget.steps=2` leaves."""
    known = summary(run)
    first = {"budget": {"steps": 1}, "step": 1, "metrics": known["metrics"]}
    last = {"budget": {"steps": 2}, "step": 2, "metrics": known["metrics"]}
    (run / "summary.json").write_text(json.dumps(known | {"completed": [first, last], "steps": 2}))
    settings = yaml.safe_load((run / "config.yaml").read_text())
    settings["budget"] = {"steps": 2}
    (run / "config.yaml").write_text(yaml.safe_dump(settings))


def asking(monkeypatch: pytest.MonkeyPatch, *needs: int) -> None:
    """Let the comparisons, in the order of the report's rows, need so many seeds."""
    waiting = [*needs]
    monkeypatch.setattr(gptattn.sweep.until, "stein_seeds", lambda *_: waiting.pop(0))


FIRST = "seed=1,2,3,4,5"


def test_each_variant_gets_its_seeds_and_the_baseline_the_most(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asking(monkeypatch, 5, 7)
    whole = arguments(tmp_path, "attn=mha,gqa,mqa", FIRST)
    assert command(tmp_path, *whole) == 0
    found = seeds_of(tmp_path)
    # Which of the two comes first is the losses' affair.
    assert found["mha"] == [1, 2, 3, 4, 5, 6, 7]
    assert sorted([found["gqa"], found["mqa"]]) == [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7]]
    home = tmp_path / "outputs" / "a"
    stages = {run.stage for run in read_runs([home])[0]}
    assert stages == {FirstStage((1, 2, 3, 4, 5), 0.02)}
    out = capfd.readouterr().out
    assert (
        "sweep.until=0.02: 5 seeds of each variant, then as many more as it needs, up to 50" in out
    )
    assert "qa needs 7 seeds; for 1 other, the first 5 are enough" in out
    # The same command has nothing left to do; with other needs it goes on from where it was.
    asking(monkeypatch, 5, 8)
    assert command(tmp_path, *whole) == 0
    assert Counter(map(len, seeds_of(tmp_path).values())) == {8: 2, 5: 1}


def test_a_variant_that_fails_at_first_does_not_stop_the_others_and_failures_are_one_error(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    launches: list[tuple[str, int]],
) -> None:
    asking(monkeypatch, 7)
    monkeypatch.setattr(sys.modules[__name__], "UNLUCKY", {("mla", 3), ("gqa", 7)})
    whole = arguments(tmp_path, "attn=mha,gqa,mla", FIRST)
    assert command(tmp_path, *whole) == 1
    assert seeds_of(tmp_path) == {
        "mha": [1, 2, 3, 4, 5, 6, 7],
        "gqa": [1, 2, 3, 4, 5, 6],
        "mla": [1, 2, 4, 5],
    }
    assert launches.count(("mla", 3)) == 1
    out, err = capfd.readouterr()
    assert "mla: without all of the first 5 seeds, no more are run of it, nor to compare" in out
    last = err.splitlines()[-1]
    assert last.startswith("error: sweep: 1 of 15 runs failed; the same command runs them again")
    assert "; then 1 of 14 runs failed; " in last


def test_seeds_follow_at_the_best_rate_and_a_variant_without_one_does_not_stop_the_others(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asking(monkeypatch, 7)
    # Seed 6 is the one that tunes: it cannot be compared.
    tune = "hydra.sweeper.tune={lr:[1e-3,2e-3],seed:6}"
    monkeypatch.setattr(sys.modules[__name__], "UNLUCKY", {("mla", 6)})
    assert command(tmp_path, *arguments(tmp_path, "attn=mha,gqa,mla", FIRST, tune)) == 1
    # Two runs at seed 6, one for each rate, then the two more that make seven.
    assert seeds_of(tmp_path) == {key: [1, 2, 3, 4, 5, 6, 6, 7, 8] for key in ["mha", "gqa"]}
    out, err = capfd.readouterr()
    assert "mla: without all of the first 5 seeds" in out
    assert err.splitlines()[-1].endswith("; the same command runs them again")


def widths(folder: Path) -> dict[str, tuple[float, int | None]]:
    """Half of each difference's interval in the report, and the seeds of its first stage."""
    (section,) = compare(read_runs([folder / "outputs" / "a"])[0]).sections
    return {
        d.variant: ((d.interval[1] - d.interval[0]) / 2, d.first)
        for d in (row.difference for row in section.rows)
        if d is not None and d.interval is not None
    }


@pytest.mark.slow
def test_every_interval_of_the_report_is_as_narrow_as_asked(tmp_path: Path) -> None:
    first = arguments(tmp_path, "attn=mha,gqa", FIRST, until="0.025")
    assert command(tmp_path, *first) == 0
    assert widths(tmp_path)["gqa"][0] <= 0.025
    # Another command at another width, with one more row, and with a variant that fails once.
    more = arguments(tmp_path, "attn=mha,gqa,mqa,mla", FIRST, until="0.03")
    assert command(tmp_path, *more) == 1
    found = widths(tmp_path)
    assert found["gqa"][0] <= 0.03
    assert found["mqa"][0] <= 0.03
    assert found["gqa"][1] == found["mqa"][1] == 5


@pytest.mark.slow
def test_two_widths_in_one_folder_keep_their_first_stage(tmp_path: Path) -> None:
    for attn, width in (("mha,gqa", "0.03"), ("mha,mqa", "0.04")):
        own = arguments(tmp_path, f"attn={attn}", FIRST, until=width)
        assert command(tmp_path, *own) == 0
    assert widths(tmp_path)["gqa"][1] == 5
    assert widths(tmp_path)["mqa"][0] <= 0.04


def test_without_the_baseline_nothing_more_is_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asking(monkeypatch)
    monkeypatch.setattr(sys.modules[__name__], "UNLUCKY", {("mha", 3)})
    assert command(tmp_path, *arguments(tmp_path, "attn=mha,gqa,mqa", FIRST)) == 1
    out = capfd.readouterr().out
    assert "mha: without all of the first 5 seeds, no more are run of it, nor to compare" in out
    assert seeds_of(tmp_path)["gqa"] == seeds_of(tmp_path)["mqa"] == [1, 2, 3, 4, 5]


def test_what_another_command_ran_in_the_folder_has_no_first_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asking(monkeypatch, 7)
    assert command(tmp_path, *arguments(tmp_path, "attn=mha,gqa", FIRST)) == 0
    alone = [a for a in arguments(tmp_path, "attn=mqa", FIRST) if "sweep.until" not in a]
    assert command(tmp_path, *alone) == 0
    runs = read_runs([tmp_path / "outputs" / "a"])[0]
    assert {run.variant for run in runs if run.stage is None} == {"mqa"}
    # A further command with until adds its variants, at the width that it asks for.
    asking(monkeypatch, 5, 5)
    wide = arguments(tmp_path, "attn=mha,mqa,gqa", FIRST, until="0.05")
    assert command(tmp_path, *wide) == 0
    runs = read_runs([tmp_path / "outputs" / "a"])[0]
    assert {run.stage for run in runs} == {FirstStage((1, 2, 3, 4, 5), 0.05)}


def test_a_run_that_was_extended_counts_as_it_was_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asking(monkeypatch, 5)
    whole = arguments(tmp_path, "attn=mha,gqa", FIRST)
    assert command(tmp_path, *whole) == 0
    for run in run_folders(tmp_path):
        extend(run)
    asking(monkeypatch, 7)
    assert command(tmp_path, *whole) == 0
    found = seeds_of(tmp_path)
    assert found["mha"] == found["gqa"] == [1, 2, 3, 4, 5, 6, 7]


def test_a_fresh_sweep_repeats_its_first_stage_once_in_a_folder_that_stays_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / "outputs" / "a" / SWEEP_LOCK
    held: list[bool] = []

    def needs(*_: object) -> int:
        held.append(is_locked(lock))
        return 7

    monkeypatch.setattr(gptattn.sweep.until, "stein_seeds", needs)
    fresh = arguments(tmp_path, "attn=mha,gqa", FIRST, "sweep.fresh=true")
    assert command(tmp_path, *fresh) == 0
    assert set(map(tuple, seeds_of(tmp_path).values())) == {(1, 2, 3, 4, 5, 6, 7)}
    assert held == [True]
    assert not is_locked(lock)


@pytest.mark.parametrize(
    ("needs", "said"),
    [
        (5, "sweep.until=0.02: the first 5 seeds decide it"),
        (280, "gqa: ±0.02 would need about 280 seeds; not run (sweep.max_seeds=50)"),
    ],
)
def test_no_more_seeds_are_run_where_none_are_needed_or_too_many(
    needs: int,
    said: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asking(monkeypatch, needs)
    assert command(tmp_path, *arguments(tmp_path, "attn=mha,gqa", FIRST)) == 0
    assert said in capfd.readouterr().out.splitlines()
    assert seeds_of(tmp_path) == {"mha": [1, 2, 3, 4, 5], "gqa": [1, 2, 3, 4, 5]}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["attn=mha,gqa", "seed=1,2,3"], "sweep.until: 0.02 needs 5 seeds or more to begin with"),
        (["attn=mha", FIRST], "sweep.until: 0.02 has one variant; give several to compare"),
        (
            ["attn=mha", FIRST, "hydra.sweeper.tune={lr:[1e-3,2e-3],seed:0}"],
            "sweep.until: 0.02 has one variant; give several to compare",
        ),
        (
            ["attn=mha,gqa", FIRST, "sweep.until=0.02,0.05"],
            "sweep.until: is one number for the whole sweep; give one",
        ),
        (
            ["attn=mha,gqa", FIRST, "sweep.keep_stale=true"],
            "sweep.until: has no place beside sweep.keep_stale: more seeds would be of other code",
        ),
        (
            ["attn=mha,gqa", FIRST, "sweep.max_seeds=4"],
            "sweep.max_seeds: 4 is less than the 5 seeds given",
        ),
        (
            ["attn=mha,gqa", FIRST, "sweep.until=0"],
            "sweep.until: 0.0 is too small; give 1e-06 or more",
        ),
        (
            ["attn=mha,gqa", FIRST, "hydra.sweeper.uptrain={source:mha}"],
            "sweep.until: has no place beside uptrain; leave one out",
        ),
    ],
)
def test_a_mistake_is_one_line_before_anything_starts(
    more: list[str], said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path, *arguments(tmp_path), *more) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"error: {said}")
    assert not (tmp_path / "outputs").exists()


def test_other_first_seeds_are_refused_once_a_sweep_went_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "outputs" / "a"
    home.mkdir(parents=True)
    write_two_stages(home, TwoStages((1, 2, 3, 4, 5), {}))
    assert command(tmp_path, *arguments(tmp_path, "attn=mha,gqa", "seed=2,3,4,5,6")) == 2
    err = capfd.readouterr().err
    assert "began with seed=1,2,3,4,5; give these, or another experiment_name" in err
