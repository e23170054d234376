"""How many runs of a sweep run at once, and how that is chosen and kept."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from support import tiny

from gptattn.cli.main import check_job
from gptattn.errors import ConfigError, SweepError
from gptattn.settings.config import Accelerator, TrainConfig
from gptattn.sweep.ledger import Ledger
from gptattn.sweep.plan import Plan
from gptattn.sweep.run_sweep import run_sweep
from gptattn.sweep.sharing import Share, quickest, shares, slots, threads_each

Jobs = int | Literal["auto"] | None


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gptattn.sweep.sharing.usable_cpus", lambda: 2)


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
        assert slots(asked) == at_once
        assert threads_each(asked, at_once) == each
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
        ("auto", None, 20, 8): [Share(8, 1)],
        ("auto", None, 1, 8): [Share(8, 1)],  # the last run of a sweep that is gone on with
        ("auto", None, 20, 16): [Share(8, 1)],  # a damaged ledger
        ("auto", 2, 20, None): [Share(4, None)],
        (2, None, 20, 8): [Share(2, 4)],
    }
    for (jobs, threads, runs, before), ways in expected.items():
        assert shares(with_sweep(cfg, jobs, threads), runs, before) == ways
    asked = with_sweep(cfg, "auto", None)
    # A trial measures single runs, so groups of seeds have the machine one after the other.
    seeds = replace(asked, sweep=replace(asked.sweep, vectorize=4))
    assert shares(seeds, 20, None) == [Share(1, None)]


@pytest.mark.parametrize("accelerator", ["auto", "gpu"])
def test_one_run_at_a_time_has_the_gpu_unless_more_are_asked_for(
    cfg: TrainConfig, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gptattn.sweep.sharing.usable_cpus", lambda: 8)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)

    def on_gpu(jobs: Jobs, threads: int | None) -> TrainConfig:
        asked = with_sweep(cfg, jobs, threads)
        return replace(asked, trainer=replace(asked.trainer, accelerator=accelerator))

    assert shares(on_gpu("auto", None), 20, None) == [Share(1, None)]
    assert shares(on_gpu("auto", 2), 20, None) == [Share(1, None)]
    assert shares(on_gpu(2, None), 20, None) == [Share(2, 4)]


def test_the_way_with_which_the_last_run_ends_first_is_taken() -> None:
    alone, both = Share(1, None), Share(2, 1)
    # Two at a time have 1.15 times the throughput, but three runs take two waves: 20 / 1.15 each.
    assert quickest({alone: [10.0] * 3, both: [20 / 1.15] * 3}) == (alone, 1.0)
    assert quickest({alone: [10.0] * 4, both: [20 / 1.15] * 4}) == (both, pytest.approx(1.15))
    # 1.04 times as fast is noise.
    assert quickest({alone: [10.0] * 4, both: [20 / 1.04] * 4}) == (alone, 1.0)
    # Both processors are busy to the end: 7, and 4 + 3.
    assert quickest({alone: [4, 2, 1.5], both: [7, 4, 3]}) == (both, pytest.approx(7.5 / 7))


def test_what_a_sweep_chose_is_kept_for_the_same_work_alone(
    cfg: TrainConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    asked: list[Sequence[Share]] = []
    jobs: list[int | str | None] = []
    together: list[int | None] = []

    def estimate(cfgs: Sequence[TrainConfig], ways: Sequence[Share]) -> dict[Share, list[float]]:
        asked.append(ways)
        return {way: [9.0] * len(cfgs) for way in ways}

    def launch(todo: Sequence[Plan]) -> list[object]:
        jobs.extend(plan.cfg.sweep.jobs for plan in todo)
        together.extend(plan.together for plan in todo)
        return []

    def sweep(cfg: TrainConfig, seeds: int) -> None:
        own = with_sweep(cfg, "auto", None)
        plans = [Plan([], replace(own, seed=s), tmp_path / f"{s}") for s in range(seeds)]
        swept = run_sweep(plans, Ledger(tmp_path), launch, in_processes=True, estimate=estimate)
        assert swept.error is not None

    sweep(cfg, 4)
    sweep(cfg, 4)
    first, second = asked
    assert len(first) == 2
    assert list(second) == [first[-1]]
    assert jobs == [first[-1].jobs] * 8
    each = "2 runs at a time on 1 thread each"
    said = f"sweep.jobs=auto: {each}, 2.00 times as fast as 1 run at a time on all cores\n"
    kept = f"sweep.jobs=auto: {each}, as chosen before\n"
    out = capfd.readouterr().out
    assert (out.count(said), out.count(kept)) == (1, 1)
    assert together == [2] * 8
    # Neither another size of the model, nor of the batch, nor another number of runs inherits it.
    wider = replace(cfg, model=replace(cfg.model, d_model=2 * cfg.model.d_model))
    for other, seeds in ((wider, 4), (replace(cfg, batch_size=8), 4), (cfg, 5)):
        sweep(other, seeds)
        assert list(asked[-1]) == list(first)


def test_more_runs_than_the_memory_holds_are_not_chosen(
    cfg: TrainConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    own = with_sweep(cfg, "auto", None)
    plans = [Plan([], replace(own, seed=seed), tmp_path / f"{seed}") for seed in (1, 2)]

    def launch(todo: Sequence[Plan]) -> list[object]:
        assert {plan.cfg.sweep.jobs for plan in todo} == {1}
        return []

    swept = run_sweep(
        plans,
        Ledger(tmp_path),
        launch,
        in_processes=True,
        estimate=lambda cfgs, ways: {ways[0]: [9.0] * len(cfgs)},
    )
    with pytest.raises(SweepError):
        swept.returns()
    said = "sweep.jobs=auto: 1 run at a time on all cores; there is no memory for more\n"
    assert said in capfd.readouterr().out
