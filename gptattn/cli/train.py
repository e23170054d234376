"""The training command around `@hydra.main`: what comes before and after a run, and how it ends.

Hydra has composed and typed the settings when `run_job` is called; it writes no files itself. A
sweep's launcher calls `run_job` too, once in each of its processes.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from gptattn.errors import ConfigError
from gptattn.machine.ending import report
from gptattn.machine.signals import (
    WORDS,
    Stopped,
    handled_signals,
    silence_stdout,
    write_stderr,
)
from gptattn.settings.compose import CONF, from_hydra
from gptattn.settings.config import check
from gptattn.settings.messages import from_hydra_error

# Of several processes of a run, the first one talks.
FIRST = all(os.environ.get(name, "0") == "0" for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"))
# Asked before `end` sets it.
SHOWS_TRACEBACK = os.environ.get("HYDRA_FULL_ERROR", "0") == "1"


def main() -> NoReturn:
    """Run `gptattn-train`, which is train.py as an installed command."""
    end(hydra.main(version_base="1.3", config_path=str(CONF), config_name="train")(run_job))


def end(task: Callable[[], Any]) -> NoReturn:
    """Call a function under `@hydra.main`, and exit with the codes of `gptattn.errors`."""
    for number in handled_signals():
        if number != signal.SIGINT:
            signal.signal(number, _terminated)
    # Hydra would print several lines and exit with 1; this makes it raise its errors.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        _check_order(sys.argv[1:])
        task()
        sys.stdout.flush()
        code = 0
    except SystemExit as ended:  # of Hydra after its help, of `run_job`, of a signal
        code = int(ended.code or 0)
    except BrokenPipeError:
        code = silence_stdout()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    except Exception as error:
        code = report(from_hydra_error(error, sys.argv[1:], CONF), SHOWS_TRACEBACK)
    sys.exit(code)


def _check_order(arguments: list[str]) -> None:
    """Raise ConfigError for a flag amid the settings, on which argparse would print its usage."""
    settings = [i for i, a in enumerate(arguments) if "=" in a and not a.startswith("-")]
    for i, argument in enumerate(arguments):
        if argument.startswith("-") and settings and settings[0] < i < settings[-1]:
            raise ConfigError("command line", f"{argument} stands amid settings; put it first")


def _terminated(signum: int, frame: object) -> NoReturn:
    signal.signal(signum, signal.SIG_IGN)  # a second one while this one is handled
    write_stderr(WORDS[signal.Signals(signum)])
    raise SystemExit(128 + signum)


def run_job(cfg: DictConfig) -> float:
    """Train the run of a composed config, or resume one; return its validation loss.

    A job of a sweep raises its errors. A single run says them, and exits.
    """
    job: Any = HydraConfig.get()
    single = job.mode == RunMode.RUN
    overrides = [str(override) for override in job.overrides.task]
    try:
        if single:
            _check_single(job)
        settings = from_hydra(cfg, job)
        folder = cfg.resume or cfg.run_dir or (job.run.dir if job.run.dir != "." else None)
        resumes = cfg.resume is not None
        if resumes:
            from gptattn.runs.load import load_config  # torch takes seconds to import
            from gptattn.settings.resumed import resumed_settings

            recorded = load_config(Path(cfg.resume), settings.allow_targets)
            settings = resumed_settings(recorded, overrides, cfg, job.runtime.choices)
        check(settings)

        from gptattn.training.run import run

        place = None if folder is None else Path(folder)
        summary = run(settings, place, overrides=overrides, resume=resumes)
        return float(summary["metrics"]["val/loss"])
    except Stopped as stopped:
        if stopped.signum == signal.SIGINT:
            raise KeyboardInterrupt from stopped
        raise SystemExit(128 + stopped.signum) from stopped
    except Exception as error:
        if job.run.dir != "." and single:  # Hydra has made it before the run was checked
            with contextlib.suppress(OSError):
                Path(job.run.dir).rmdir()
        if not single:
            raise
        # Hydra would add a line of its own to what it lets through.
        raise SystemExit(report(error, SHOWS_TRACEBACK)) from error


def _check_single(job: DictConfig) -> None:
    """Raise ConfigError for what only a sweep can do, and for Hydra's own files."""
    if any(job.sweeper.get(name) for name in ("params", "variants", "tune")):
        raise ConfigError("command line", "these settings define a sweep; add -m")
    if job.output_subdir is not None:
        raise ConfigError(
            "hydra.output_subdir", "is not used: config.yaml is the record; leave it out"
        )
    if job.job.chdir:
        raise ConfigError("hydra.job.chdir", "would move relative paths; leave it out")
