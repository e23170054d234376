"""The environment: which processes a launcher has started, what it has left, how threads wait."""

import importlib
import os

import pytest
from support import check_job, command, refuses, summary, tiny

import gptattn
from gptattn.machine.launcher import is_first

LEFT = {  # by torchrun, by srun and its scripts, by Lightning
    "RANK": "1",
    "LOCAL_RANK": "1",
    "NODE_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "192.0.2.1",
    "MASTER_PORT": "1",
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NAME": "job",
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_NNODES": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "0",
}


def test_leftover_launcher_variables_do_not_change_a_single_process_run(tmp_path, monkeypatch):
    for name, value in LEFT.items():
        monkeypatch.setenv(name, value)
    assert command(tmp_path, *tiny(tmp_path, "run_dir=run")) == 0
    assert summary(tmp_path / "run")["environment"]["processes"] == 1


@pytest.mark.parametrize("rank", ["RANK", "SLURM_PROCID", "LOCAL_RANK"])
def test_one_process_of_a_launcher_is_the_first(rank, monkeypatch):
    for value in ("0", "1"):
        monkeypatch.setenv(rank, value)
        assert is_first() == (value == "0")


def test_the_processes_are_those_that_srun_has_started(tmp_path, monkeypatch):
    with refuses("trainer.num_nodes: srun"):
        check_job(tiny(tmp_path, "trainer.num_nodes=2"))
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "2")
    monkeypatch.setenv("SLURM_NNODES", "2")
    auto = ("trainer.devices=auto", "trainer.num_nodes=auto")
    assert check_job(tiny(tmp_path, *auto)).trainer.processes == 4


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_how_threads_wait_is_the_user_s_choice_first(name, monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    with monkeypatch.context() as patch:
        patch.setenv(name, "7")
        importlib.reload(gptattn)
        assert (os.environ.get("GOMP_SPINCOUNT") or "7", os.environ[name]) == ("7", "7")
    importlib.reload(gptattn)
    assert int(os.environ["GOMP_SPINCOUNT"]) < 300_000  # libgomp's default
