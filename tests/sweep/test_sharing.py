"""How many runs of a sweep run at once, and how that is chosen and kept."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from support import tiny

from gptattn.cli.main import check_job
from gptattn.errors import ConfigError, SweepError
from gptattn.settings.config import TrainConfig
from gptattn.sweep.estimate import Timing
from gptattn.sweep.plan import Plan
from gptattn.sweep.run_sweep import run_sweep
from gptattn.sweep.sharing import Share, shares, slots, threads_each

Jobs = int | Literal["auto"] | None


@pytest.fixture
def cfg(tmp_path: Path) -> TrainConfig:
    return check_job(tiny(tmp_path / "in"))


def with_sweep(cfg: TrainConfig, jobs: Jobs, threads: int | None) -> TrainConfig:
    trainer = replace(cfg.trainer, threads=threads)
    return replace(cfg, sweep=replace(cfg.sweep, jobs=jobs), trainer=trainer)


def test_runs_at_once_and_their_threads_share_the_cores(
    cfg: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gptattn.sweep.sharing.usable_cpus", lambda: 8)
    # (sweep.jobs, trainer.threads) -> (runs at once, threads given to each)
    expected = {
        (None, None): (1, None),
        (None, 2): (4, None),
        (None, 3): (2, None),
        (4, None): (4, 2),
        (3, None): (3, 2),
        (2, 2): (2, None),
        (None, 16): (1, None),
    }
    for (jobs, threads), (at_once, each) in expected.items():
        asked = with_sweep(cfg, jobs, threads)
        assert (slots(asked), threads_each(asked)) == (at_once, each)
    for jobs, threads in ((9, None), (5, 2)):
        with pytest.raises(ConfigError, match=r"sweep\.jobs"):
            slots(with_sweep(cfg, jobs, threads))


def test_a_sweep_chooses_how_to_share_the_machine_only_where_nothing_is_set(
    cfg: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gptattn.sweep.sharing.usable_cpus", lambda: 8)
    # (sweep.jobs, trainer.threads, runs, runs at once when it last chose) -> the ways to share
    expected: dict[tuple[Jobs, int | None, int, int | None], list[Share]]
    expected = {
        ("auto", None, 20, None): [Share(1, None), Share(8, 1)],
        (None, None, 20, None): [Share(1, None), Share(8, 1)],  # as older records have it
        ("auto", None, 3, None): [Share(1, None), Share(3, 2)],
        ("auto", None, 1, None): [Share(1, None)],
        ("auto", None, 1, 8): [Share(8, 1)],  # the last run of a sweep that is gone on with
        ("auto", None, 20, 16): [Share(8, 1)],  # on a machine with fewer cores
        ("auto", 2, 20, None): [Share(4, None)],
        (2, None, 20, 8): [Share(2, 4)],
    }
    for (jobs, threads, runs, before), ways in expected.items():
        assert shares(with_sweep(cfg, jobs, threads), runs, before) == ways
    asked = with_sweep(cfg, "auto", None)
    on_gpu = replace(asked, trainer=replace(asked.trainer, accelerator="gpu"))
    assert shares(on_gpu, 20, None) == [Share(1, None)]


def test_what_a_sweep_chose_is_kept_when_it_goes_on(
    cfg: TrainConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plans = [
        Plan([], replace(with_sweep(cfg, "auto", None), seed=seed), tmp_path / f"{seed}")
        for seed in (1, 2, 3)
    ]
    asked: list[Sequence[Share]] = []
    jobs: list[int | str | None] = []

    def estimate(cfgs: Sequence[TrainConfig], ways: Sequence[Share]) -> Timing:
        asked.append(ways)
        return Timing([9.0] * len(cfgs), ways[-1], 1.5)

    def launch(todo: Sequence[Plan]) -> list[object]:
        jobs.extend(plan.cfg.sweep.jobs for plan in todo)
        return []

    for _ in range(2):
        with pytest.raises(SweepError):
            run_sweep(plans, tmp_path, launch, in_processes=True, estimate=estimate)
    first, second = asked
    assert len(first) == 2
    assert list(second) == [first[-1]]
    assert jobs == [first[-1].jobs] * 6
    said = "sweep.jobs=auto: 2 runs at a time on 1 thread each, 1.50 times the throughput of 1 run"
    assert capfd.readouterr().out.count(said) == 1
