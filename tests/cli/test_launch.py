"""A run's processes: those of torchrun and srun, and those that the command starts itself."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from building import settings
from ranks import SHARED
from support import command, process_state, rows, tiny
from torch.distributed.launcher.api import LaunchConfig
from tortures.bench import LIMIT_SECONDS

from gptattn.cli.launch import _start, placed
from gptattn.errors import ConfigError
from gptattn.machine.place import Place, as_torchrun, first_node, place_here

STARTED = Place(0, 2, 0, 2, launched=True)  # the first of two
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_ID": "31234",
    "SLURM_STEP_ID": "2",
}


@pytest.mark.parametrize("environment", [TORCHRUN, SRUN], ids=["torchrun", "srun"])
def test_the_place_is_what_the_launcher_says(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    place = place_here()
    assert place == Place(rank=5, size=8, local_rank=1, local_size=4, launched=True)
    assert (place.nodes, place.first) == (2, False)


def test_processes_that_srun_cannot_spread_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**SRUN, "SLURM_STEP_NUM_TASKS": "7"}.items():
        monkeypatch.setenv(name, value)
    assert place_here() == Place(rank=5, size=7, local_rank=1, local_size=4, launched=True)


@pytest.mark.parametrize(
    "environment",
    [{}, {"WORLD_SIZE": "8", "RANK": "5"}, {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}],
    ids=["alone", "no local rank", "a batch script"],
)
def test_without_a_launcher_a_process_is_alone(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert place_here() == Place()


def test_processes_of_srun_meet_on_the_first_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SRUN.items():
        monkeypatch.setenv(name, value)
    for name in (*TORCHRUN, "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that it is removed again
        monkeypatch.delenv(name)
    as_torchrun(place_here())
    assert {name: os.environ[name] for name in TORCHRUN} == TORCHRUN
    assert os.environ["GROUP_RANK"] == "1"
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("gpu07", "16236")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu[07-09,12],big", "gpu07"), ("a1,b2", "a1"), ("n1", "n1"), ("x[3]", "x3")],
)
def test_the_first_of_slurms_nodes(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


def test_auto_is_the_number_of_processes_that_were_started() -> None:
    cfg = settings("trainer=ddp", "trainer.accelerator=cpu")
    assert placed(cfg, Place(1, 4, 1, 2, launched=True)).trainer.processes == 4
    assert placed(cfg, Place()).trainer.processes == 1
    assert placed(cfg, Place(launched=True)).trainer.processes == 1
    trainer = placed(cfg, Place(1, 4, 1, 2, launched=True)).trainer
    assert (trainer.devices, trainer.num_nodes) == (2, 2)


@pytest.mark.parametrize(
    ("overrides", "place", "field"),
    [
        (("trainer=cpu",), STARTED, "trainer.devices"),
        (("trainer=ddp", "trainer.devices=4"), STARTED, "trainer.devices"),
        (("trainer=ddp", "trainer.num_nodes=2"), STARTED, "trainer.num_nodes"),
        (("trainer=ddp",), Place(0, 3, 0, 2, launched=True), "trainer.devices"),
        (("trainer=ddp", "batch_size=9"), STARTED, "batch_size"),
        (("trainer=cpu", "trainer.devices=3"), Place(), "batch_size"),
    ],
)
def test_what_does_not_fit_the_processes_is_refused(
    overrides: tuple[str, ...], place: Place, field: str
) -> None:
    with pytest.raises(ConfigError) as error:
        placed(settings("trainer.accelerator=cpu", *overrides), place)
    assert error.value.field == field


def test_a_sweep_of_several_processes_is_refused_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    several = tiny(tmp_path, "trainer.devices=2", "seed=1,2")
    assert command(tmp_path, "-m", *several) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: trainer.devices: a sweep trains each run in one process; ")
    assert not (tmp_path / "outputs").exists()


def test_several_machines_need_a_start_on_each(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path, *tiny(tmp_path, "trainer.devices=2", "trainer.num_nodes=2")) == 2
    assert "torchrun --nnodes=2 --nproc-per-node=2 train.py" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("hangs_up", "handled"), [(True, "SIGINT,SIGTERM,SIGHUP"), (False, "SIGINT,SIGTERM")]
)
def test_a_run_under_nohup_outlives_its_terminal(
    hangs_up: bool, handled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[LaunchConfig] = []

    def elastic_launch(config: LaunchConfig, program: str) -> Callable[..., None]:
        started.append(config)
        return lambda *arguments: None

    monkeypatch.setattr("torch.distributed.launcher.api.elastic_launch", elastic_launch)
    monkeypatch.setattr(logging.root.manager, "disable", 0)  # so that it is set back
    with process_state():
        signal.signal(signal.SIGHUP, signal.SIG_DFL if hangs_up else signal.SIG_IGN)
        with pytest.raises(SystemExit) as end:
            _start(2, ["attn=mha"])
    assert end.value.code == 0
    assert started[0].signals_to_handle == handled
    assert started[0].nproc_per_node == 2


def launched(folder: Path, *launcher: str) -> "subprocess.Popen[bytes]":
    """A run that goes on until it is stopped."""
    arguments = tiny(folder, *SHARED, "budget.steps=100000", "validation.count=10000")
    with (folder / "log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, "-m", *launcher, *arguments, "sample.tokens=0"],
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


TORCHRUN_HERE = ("torch.distributed.run", "--nproc-per-node=2", "-m", "gptattn.cli.process")
OUR_OWN = ("gptattn.cli.process", "trainer.devices=2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "number", "code"),
    [
        (TORCHRUN_HERE, signal.SIGTERM, 1),
        (TORCHRUN_HERE, signal.SIGKILL, -signal.SIGKILL),
        (OUR_OWN, signal.SIGTERM, 128 + signal.SIGTERM),
        (OUR_OWN, signal.SIGKILL, -signal.SIGKILL),
    ],
    ids=["torchrun", "torchrun, killed", "our own", "our own, killed"],
)
def test_a_launcher_that_is_stopped_leaves_a_saved_run_and_no_process(
    launcher: tuple[str, ...], number: signal.Signals, code: int, tmp_path: Path
) -> None:
    process, checkpoints = launched(tmp_path, *launcher), tmp_path / "run" / "checkpoints"
    log, deadline = tmp_path / "log", time.monotonic() + LIMIT_SECONDS
    while not list(checkpoints.glob("*.safetensors")):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    assert process.wait(LIMIT_SECONDS) == code, log.read_text()
    while number == signal.SIGKILL and _processes(tmp_path):  # they outlive it, to save
        assert time.monotonic() < deadline + LIMIT_SECONDS
        time.sleep(0.01)
    assert log.read_text().count("holds step") == 1
    assert code == 1 or "death signal" not in log.read_text()  # torchrun adds its own lines
    last = rows(tmp_path / "run")[-1]["step"]
    assert (checkpoints / f"step={last}.safetensors").exists()
    assert not _processes(tmp_path)


def _processes(folder: Path) -> list[Path]:
    return [pid for pid in Path("/proc").glob("[0-9]*") if str(folder) in _command(pid)]


def _command(process: Path) -> str:
    try:
        return (process / "cmdline").read_text()
    except OSError:  # it has ended meanwhile
        return ""
