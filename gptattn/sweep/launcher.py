"""Runs the jobs of a sweep on this machine: each in its own process, several at a time.

A job that fails, is killed or hangs costs only itself. Every process is forked from a server that
has imported the large libraries, but none of this project's code: each run reads that for itself.
"""

import importlib
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from hydra.types import HydraContext
from omegaconf import DictConfig, open_dict

from gptattn.errors import OutOfMemory
from gptattn.machine.console import make_console
from gptattn.machine.ending import report
from gptattn.machine.signals import handled_signals
from gptattn.runs.folder import RunFolder
from gptattn.sweep.progress import SweepProgress

LIBRARIES = ["torch", "lightning.pytorch", "torch.utils.tensorboard", "hydra"]
LOOK_SECONDS = 0.5
GRACE_SECONDS = 20.0  # between SIGTERM and SIGKILL
LAST_BYTES = 16_384  # of a console.log that are searched for the error


class TimeOver(BaseException):
    """Raised when the minutes of a sweep are over.

    It is not an Exception, so that code which catches those lets it through.
    """


@dataclass
class _Job:
    number: int
    folder: Path
    process: Any  # multiprocessing's, of the forkserver context
    alive: Connection  # the process ends when this end closes, by our death too
    start: float
    memory_kills: int


def launch_processes(
    context: HydraContext, config: DictConfig, jobs: Sequence[Sequence[str]], first: int
) -> list[JobReturn]:
    """Run all jobs, `config.sweep.jobs` at a time; their runs' folders say how they ended.

    Raises TimeOver when `config.sweep.minutes` are over. On any exception, such as an interrupt,
    the processes get SIGTERM, after GRACE_SECONDS SIGKILL, and the exception is raised again.
    """
    slots = int(config.sweep.jobs)
    minutes = config.sweep.minutes
    until = None if minutes is None else time.monotonic() + 60 * float(minutes)
    if slots > 1:  # a thread that waits must not take the processor of another run
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(LIBRARIES)
    waiting = list(enumerate(jobs, first))
    active: list[_Job] = []
    try:
        with SweepProgress(make_console(), len(waiting), slots) as progress:
            while waiting or active:
                if until is not None and time.monotonic() >= until:
                    raise TimeOver
                while waiting and len(active) < slots:
                    number, overrides = waiting.pop(0)
                    active.append(_start(processes, context, config, number, overrides))
                wait([job.process.sentinel for job in active], LOOK_SECONDS)
                for job in [job for job in active if job.process.exitcode is not None]:
                    active.remove(job)
                    job.alive.close()
                    _note_failure(job)
                    progress.ended(job.folder, time.monotonic() - job.start)
                progress.show([job.folder for job in active])
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
    folder.mkdir(parents=True, exist_ok=True)
    RunFolder(folder).failure_file.unlink(missing_ok=True)  # of an earlier start
    log = str(RunFolder(folder).console_file)
    theirs, ours = processes.Pipe(duplex=False)
    process = processes.Process(
        target=_work, args=(context, job_config, Singleton.get_state()["instances"], log, theirs)
    )
    kills = _memory_kills()
    process.start()
    theirs.close()
    return _Job(number, folder, process, ours, time.monotonic(), kills)


def _work(
    context: HydraContext, config: DictConfig, instances: Any, log: str, alive: Connection
) -> None:
    """Run one job in this process, as Hydra's own launchers do; exit with its code."""
    os.setpgrp()  # Ctrl-C reaches only the sweep, which ends its runs
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for number, file in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, output)):
        os.dup2(file, number)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    threading.Thread(target=_end_with_the_sweep, args=(alive,), daemon=True).start()
    setup_globals()
    # Not OmegaConf's resolvers, which do not pickle: `setup_globals` has registered Hydra's.
    Singleton.set_state({**Singleton.get_state(), "instances": instances})

    # By name: what `@hydra.main` decorates does not pickle.
    train = importlib.import_module("gptattn.cli.train")
    done = run_job(
        hydra_context=context,
        task_function=train.run_job,
        config=config,
        job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
        configure_logging=False,
    )
    try:
        _ = done.return_value
    except Exception as error:
        sys.exit(report(error, True))


def _end_with_the_sweep(alive: Connection) -> None:
    wait([alive])  # its other end has been closed
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def _note_failure(job: _Job) -> None:
    """Write why the run has ended, where it could not do so itself."""
    run, code = RunFolder(job.folder), job.process.exitcode
    if run.done or run.failure_file.exists():
        return
    if code == -signal.SIGKILL and _memory_kills() > job.memory_kills:
        code = OutOfMemory.exit_code
        reason = "memory: killed by the kernel, because the machine ran out of memory"
    elif code < 0:
        reason = f"killed by {signal.Signals(-code).name}"
        code = 128 - code
    else:
        reason = _last_error(run.console_file) or f"exit code {code}"
    run.write_failure(code or 1, reason)


def _last_error(log: Path) -> str:
    """Return the log's last `error:` line, or else its last line; "" without any."""
    lines = log.read_bytes()[-LAST_BYTES:].decode("utf-8", errors="replace").splitlines()
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or [""])[-1]


def _memory_kills() -> int:
    """Return how many processes the kernel has killed for lack of memory; 0 if unknown."""
    try:
        found = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found.group(1)) if found is not None else 0


def _stop(active: Sequence[_Job]) -> None:
    before = {n: signal.signal(n, signal.SIG_IGN) for n in handled_signals()}
    try:  # a second Ctrl-C leaves no processes behind
        for job in active:
            job.process.terminate()
        deadline = time.monotonic() + GRACE_SECONDS
        for job in active:
            job.process.join(max(0.0, deadline - time.monotonic()))
            if job.process.exitcode is None:
                job.process.kill()
                job.process.join()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
