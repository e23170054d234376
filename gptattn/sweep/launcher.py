"""Runs the jobs of a sweep on this machine, each in its own process, several in parallel.

A job that fails, is killed or hangs does not affect the others. Processes are forked from a server
that has imported the large libraries; each run imports this project's code afresh.
"""

import importlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from statistics import fmean
from typing import Any

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from hydra.types import HydraContext
from omegaconf import DictConfig, open_dict

from gptattn.machine.console import format_duration
from gptattn.machine.ending import as_user_error, handle_signals, report
from gptattn.machine.launcher import forget_launchers
from gptattn.runs.folder import RunFolder
from gptattn.sweep.progress import describe_end, describe_running

LIBRARIES = ["torch", "lightning.pytorch", "torch.utils.tensorboard", "hydra"]
LOOK_SECONDS = 0.5
QUIET_SECONDS, MAX_QUIET_SECONDS = 5.0, 60.0  # between lines while no run ends
GRACE_SECONDS = 120.0  # from SIGTERM to SIGKILL: time for a large model's step and checkpoint


@dataclass
class _Job:
    folder: Path
    process: Any  # a process of multiprocessing's forkserver context
    start: float


def launch_processes(
    context: HydraContext,
    config: DictConfig,
    jobs: Sequence[Sequence[str]],
    first: int,
    slots: int,
) -> list[JobReturn]:
    """Run all jobs, `slots` at a time; their run folders record how they ended.

    On any exception, such as an interrupt, the processes get SIGTERM, then SIGKILL after
    GRACE_SECONDS, and the exception is raised again.
    """
    forget_launchers()  # each run has one process
    forks = "forkserver" in multiprocessing.get_all_start_methods()  # not on Windows
    processes = multiprocessing.get_context("forkserver" if forks else "spawn")
    if forks:
        processes.set_forkserver_preload(LIBRARIES)
    waiting = list(enumerate(jobs, first))
    active: list[_Job] = []
    runs, ended = len(jobs), 0
    durations: list[float] = []  # of each finished run
    start = printed = time.monotonic()
    try:
        while waiting or active:
            while waiting and len(active) < slots:
                number, overrides = waiting.pop(0)
                active.append(_start(processes, context, config, number, overrides))
            wait([job.process.sentinel for job in active], LOOK_SECONDS)
            for job in [job for job in active if job.process.exitcode is not None]:
                active.remove(job)
                _note_failure(job)
                ended, seconds = ended + 1, time.monotonic() - job.start
                if RunFolder(job.folder).done:
                    durations.append(seconds)
                line = f"[{ended}/{runs}] {describe_end(job.folder, seconds)}"
                if durations and ended < runs:
                    left = fmean(durations) * (runs - ended) / slots
                    line += f"; about {format_duration(left)} left"
                print(line, flush=True)
                printed = time.monotonic()
            now = time.monotonic()
            # A long sweep prints less often.
            quiet = min(max(QUIET_SECONDS, (now - start) / 20), MAX_QUIET_SECONDS)
            if active and now - printed > quiet:
                lines = [describe_running(job.folder, now - job.start) for job in active]
                print(f"[{ended}/{runs}] running", *lines, sep="\n  ", flush=True)
                printed = now
    except BaseException:
        _stop(active)
        raise
    return [JobReturn(overrides=list(job), status=JobStatus.COMPLETED) for job in jobs]


def _start(
    processes: Any, context: HydraContext, config: DictConfig, number: int, overrides: Sequence[str]
) -> _Job:
    job_config = context.config_loader.load_sweep_config(config, list(overrides))
    with open_dict(job_config):
        job_config.hydra.job.id, job_config.hydra.job.num = str(number), number
    folder = Path(job_config.resume or job_config.run_dir)
    process = processes.Process(
        target=_run_in_process,
        args=(context, job_config, Singleton.get_state()["instances"], folder),
    )
    process.start()
    return _Job(folder, process, time.monotonic())


def _run_in_process(
    context: HydraContext, config: DictConfig, instances: Any, folder: Path
) -> None:
    """Run one job in this process, like Hydra's own launchers; exit with its code."""
    if hasattr(os, "setpgrp"):  # not on Windows
        os.setpgrp()  # Ctrl-C then reaches only the sweep, which ends its runs
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    threading.Thread(target=_end_with_the_sweep, daemon=True).start()
    run = RunFolder(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        run.failure_file.unlink(missing_ok=True)  # of an earlier start
        output = os.open(run.console_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        for number, file in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, output)):
            os.dup2(file, number)
        setup_globals()
        # OmegaConf's resolvers do not pickle, but `setup_globals` has registered Hydra's.
        Singleton.set_state({**Singleton.get_state(), "instances": instances})
        # By name, since a function decorated with `@hydra.main` does not pickle.
        train = importlib.import_module("gptattn.cli.train")
        done = run_job(
            hydra_context=context,
            task_function=train.run_job,
            config=config,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
            configure_logging=False,
        )
        _ = done.return_value  # raises the job's error
    except Exception as error:
        code = report(error, True)
        user_error = as_user_error(error)
        run.write_failure(code, str(user_error or f"{type(error).__name__}: {error}"))
        sys.exit(code)


def _end_with_the_sweep() -> None:
    sweep = multiprocessing.parent_process()
    assert sweep is not None
    sweep.join()  # returns once it has died, even of SIGKILL
    os.kill(os.getpid(), signal.SIGTERM)  # ends the process on Windows, which has no SIGKILL
    time.sleep(GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def _note_failure(job: _Job) -> None:
    """Record why the run ended, if it could not do so itself."""
    run, code = RunFolder(job.folder), job.process.exitcode
    if run.done or run.failure_file.exists():
        return
    reason = f"exit code {code}; see {run.console_file.name}"
    if code < 0:
        reason = f"killed by {signal.Signals(-code).name}"
        reason += "; perhaps the machine ran out of memory" * (code == -9)  # SIGKILL
        code = 128 - code
    if job.folder.is_dir():
        run.write_failure(code or 1, reason)


def _stop(active: Sequence[_Job]) -> None:
    with handle_signals(signal.SIG_IGN):  # so that a second Ctrl-C leaves no processes behind
        for job in active:
            job.process.terminate()
        deadline = time.monotonic() + GRACE_SECONDS
        for job in active:
            job.process.join(max(0.0, deadline - time.monotonic()))
            if job.process.exitcode is None:
                job.process.kill()
                job.process.join()
