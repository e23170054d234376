"""Sweeps as a user types them: what runs, what is skipped, what is resumed, and how they end."""

import json
from pathlib import Path

import pytest
from support import command, config, run_folders, series, summary, tiny

from gptattn.machine.lock import locked
from gptattn.runs.folder import RunFolder
from gptattn.runs.sweep_states import SWEEP_LOCK

FOUR = ("-m", "attn=mha,gqa", "seed=1,2")
HOME = Path("outputs", "scratch")


def sweep(folder: Path, *overrides: str) -> int:
    return command(folder, *overrides[:1], *tiny(folder, *overrides[1:]))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of four runs. Not to be changed."""
    folder = tmp_path_factory.mktemp("four")
    assert sweep(folder, *FOUR, "trainer.threads=null", "sweep.jobs=1") == 0
    return folder


def test_every_combination_is_a_run_with_its_settings(four: Path) -> None:
    runs = run_folders(four)
    found = sorted((config(run)["choices"]["attn"], config(run)["seed"]) for run in runs)
    assert found == [("gqa", 1), ("gqa", 2), ("mha", 1), ("mha", 2)]
    for run in runs:
        assert run.parent == four / HOME
        assert run.name.startswith(f"{summary(run)['variant']}_s{summary(run)['seed']}_")
        assert (run / "console.log").read_text().endswith(f"logdir {HOME}\n")


def test_a_run_of_a_sweep_has_the_losses_of_the_same_command_alone(
    four: Path, tmp_path: Path
) -> None:
    alone = tiny(tmp_path, "attn=gqa", "seed=2", f"data.path={four / 'text.txt'}")
    assert command(tmp_path, *alone) == 0
    (one,) = run_folders(tmp_path)
    (same,) = (run for run in run_folders(four) if run.name.startswith("gqa_s2"))
    assert series(one, "val/loss") == series(same, "val/loss")


def test_the_same_command_again_runs_what_is_not_done(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = ("-m", "attn=mha,gqa", "seed=1")
    assert sweep(tmp_path, *given) == 0
    first = run_folders(tmp_path)
    (gone,) = (run for run in first if run.name.startswith("gqa"))
    before = series(gone, "val/loss")
    # As after a kill: it has checkpoints and no summary.
    (gone / "summary.json").unlink()
    capfd.readouterr()
    assert sweep(tmp_path, *given) == 0
    assert "2 runs, 1 already done, 1 to resume" in capfd.readouterr().out
    assert run_folders(tmp_path) == first
    assert series(gone, "val/loss") == before
    assert sweep(tmp_path, *given) == 0
    assert "nothing to do" in capfd.readouterr().out


def test_a_run_that_fails_costs_only_itself(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = ("-m", "attn=mha", "optim.lr=1e-3,1e30", "optim.grad_clip=1e30")
    assert sweep(tmp_path, *given) == 5
    out, err = capfd.readouterr()
    assert len(run_folders(tmp_path)) == 1
    (failed,) = (tmp_path / HOME).glob("*/failure.json")
    assert json.loads(failed.read_text())["exit"] == 5
    assert "failed" in out
    assert "1 of 2 runs failed" in err
    assert not RunFolder(failed.parent).done
    assert sweep(tmp_path, *given) == 5  # typed again, it is made again: nothing passes for done
    assert "2 runs, 1 already done" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        (("attn=mha,gqaa",), "attn"),
        (("attn=mha,gqa", "model.num_heads=4,3"), "model.num_heads"),
        (("sweep.jobs=99", "attn=mha,gqa"), "sweep.jobs"),
        (("hydra.sweeper.variants=['attn=mha seed=1']", "seed=1,2"), "seed"),
        (("ladder.sizes=[32x2,16x2]",), "ladder.sizes"),
        (("hydra/launcher=basic", "sweep.minutes=1"), "sweep.minutes"),
        (("attn=mha,gqa", "seed=1,2", "sweep.until=0.1"), "sweep.until"),
        (("hydra.sweeper.tune={lr:[1e-3],seed:1}",), "hydra.sweeper.tune.seed"),
        (("hydra.sweeper.tune={lr:[1e-3]}",), "hydra.sweeper.tune.seed"),
    ],
)
def test_a_mistake_is_one_line_before_the_first_run_starts(
    overrides: tuple[str, ...], field: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert sweep(tmp_path, "-m", *overrides) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"error: {field}: ")
    assert not list(tmp_path.glob("outputs/*/*/config.yaml"))


def test_a_second_sweep_in_the_folder_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with locked(tmp_path / HOME / SWEEP_LOCK, "test", "busy"):
        assert sweep(tmp_path, "-m", "attn=mha,gqa") == 6
    assert capfd.readouterr().err.startswith("error: hydra.sweep.dir: another process is running")


def test_other_code_and_text_make_new_runs_and_name_the_old(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert sweep(tmp_path, "-m", "attn=mha") == 0
    (old,) = run_folders(tmp_path)
    record = json.loads((old / "identity.json").read_text())
    record["code"]["gptattn.model.gpt"] = "0" * 16
    (old / "identity.json").write_text(json.dumps(record))
    capfd.readouterr()
    assert sweep(tmp_path, "-m", "attn=mha", "sweep.keep_stale=true") == 0
    assert "1 already done" in capfd.readouterr().out
    assert sweep(tmp_path, "-m", "attn=mha") == 0
    out = capfd.readouterr().out
    assert f"stale: {old.name}: code of gptattn.model.gpt" in out
    assert len(run_folders(tmp_path)) == 2


def test_tuning_compares_each_variant_at_its_best_rate(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tune = "hydra.sweeper.tune={lr:[1e-4,1e-2],seed:0}"
    given = ("-m", "attn=mha,gqa", "seed=1", tune, "validation.count=1")
    assert sweep(tmp_path, *given) == 0
    tried = [run for run in run_folders(tmp_path) if run.parent.name == "tuning"]
    assert sorted(config(run)["optim"]["lr"] for run in tried) == [1e-4, 1e-4, 1e-2, 1e-2]
    losses = {
        (config(r)["choices"]["attn"], config(r)["optim"]["lr"]): series(r, "val/loss")[-1][1]
        for r in tried
    }
    compared = [run for run in run_folders(tmp_path) if run.parent.name == "scratch"]
    for run in compared:
        attn = config(run)["choices"]["attn"]
        best = min((1e-4, 1e-2), key=lambda lr: losses[attn, lr])
        assert (config(run)["seed"], config(run)["optim"]["lr"]) == (1, best)
    assert len(compared) == 2
    capfd.readouterr()
    assert sweep(tmp_path, *given) == 0
    assert len(run_folders(tmp_path)) == 6


def test_a_sweep_goes_on_until_its_intervals_are_narrow(tmp_path: Path) -> None:
    given = ("-m", "attn=mha,gqa", "seed=1,2,3,4,5", "validation.count=1", "sample.tokens=0")
    assert sweep(tmp_path, *given, "sweep.until=100") == 0  # the first seeds decide it
    assert len(run_folders(tmp_path)) == 10
    record = json.loads((tmp_path / HOME / "until.json").read_text())
    assert record["first"] == [1, 2, 3, 4, 5]
    assert set(record["half_widths"].values()) == {100.0}
    # Another first stage than it began with would make the second one pass for a first.
    other = ("-m", "attn=mha,gqa", "seed=2,3,4,5,6", "sweep.until=100")
    assert sweep(tmp_path, *other) == 2
