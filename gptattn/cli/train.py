"""The training command: wraps `@hydra.main`, and turns the end of a run into an exit code.

Hydra composes the settings, then calls `run_job`; it writes no files itself. A sweep's
launcher also calls `run_job`, once in each of its processes.
"""

import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

import gptattn.cli.help  # noqa: F401  its resolvers fill the template of --help
from gptattn.errors import ConfigError
from gptattn.machine.disk import expand_path
from gptattn.machine.ending import (
    WORDS,
    Stopped,
    handled_signals,
    report,
    run_command,
    silence_stdout,
    write_stderr,
)
from gptattn.machine.launcher import is_first
from gptattn.runs.metrics import LOSS
from gptattn.settings.compose import CONF, from_hydra, resume_settings
from gptattn.settings.config import check
from gptattn.settings.messages import explain_hydra_error, name_typed

# Hydra's flags. For any other, argparse would print its whole usage.
FLAGS = (
    "--help", "--hydra-help", "--version", "--cfg", "--resolve", "--package", "--run", "--multirun",
    "--shell-completion", "--config-path", "--config-name", "--config-dir", "--info",
    "-h", "-c", "-p", "-r", "-m", "-sc", "-cp", "-cn", "-cd", "-i",
)  # fmt: skip
# Read before `end` sets it.
SHOWS_TRACEBACK = os.environ.get("HYDRA_FULL_ERROR", "0") == "1"


def main() -> NoReturn:
    """Run `gptattn-train`, the installed form of train.py."""
    end(hydra.main(version_base="1.3", config_path=str(CONF), config_name="train")(run_job))


def end(task: Callable[[], Any]) -> NoReturn:
    """Call a function decorated with `@hydra.main`; exit with a code of `gptattn.errors`."""
    for number in handled_signals():  # a shell starts its background jobs with SIGINT ignored
        handler = signal.default_int_handler if number == signal.SIGINT else _terminated
        signal.signal(number, handler)
    # Makes Hydra raise its errors, instead of printing several lines and exiting with 1.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    arguments = sys.argv[1:]
    # For a flag between settings, argparse would print its usage.
    settings = [i for i, a in enumerate(arguments) if "=" in a and not a.startswith("-")]
    for i, argument in enumerate(arguments):
        name, mistake = argument.partition("=")[0], None
        if name.startswith("-") and not any(flag.startswith(name) for flag in FLAGS):
            given = [argument.partition("=")[2], *arguments[i + 1 : i + 2]]
            value = next((one for one in given if one and "=" not in one), "VALUE")
            how = f"write {name.lstrip('-').replace('-', '_')}={value}, or see --help"
            mistake = "command line", f"{name} is not a flag; {how}"
        elif argument.startswith("-") and settings and settings[0] < i < settings[-1]:
            mistake = "command line", f"{argument} must come before the settings"
        elif name == "hydra.run.dir" and is_first():  # Lightning gives it to the others
            mistake = name, "is not used here; give run_dir=FOLDER"
        elif name == "hydra/sweeper" and argument != "hydra/sweeper=gptattn":
            mistake = name, "is fixed; to tune, use hydra.sweeper.tune (docs/sweeps.md)"
        elif name in ("run_dir", "resume") and {"-m", "--multirun"} & {*arguments}:
            mistake = name, "names one run, but -m starts many; leave one of them out"
        if mistake is not None:
            sys.exit(report(ConfigError(*mistake)))
    explain = partial(explain_hydra_error, overrides=arguments, conf=CONF)
    sys.exit(run_command(task, SHOWS_TRACEBACK, explain))


def _terminated(signum: int, frame: object) -> NoReturn:
    signal.signal(signum, signal.SIG_IGN)  # ignore a second one while handling this one
    write_stderr(WORDS[signal.Signals(signum)])
    raise SystemExit(128 + signum)


def run_job(cfg: DictConfig) -> float:
    """Train the run of a composed config, or resume a run; return its validation loss.

    A sweep's job raises errors; a single run prints them and exits.
    """
    job: Any = HydraConfig.get()
    single = job.mode == RunMode.RUN
    if single and not SHOWS_TRACEBACK:
        os.environ.pop("HYDRA_FULL_ERROR", None)  # or the run's other processes would inherit it
    overrides: Any = OmegaConf.to_container(job.overrides.task)
    try:
        defined = [job.sweeper.get(name) for name in ("params", "variants", "tune")]
        if single and any([*defined, cfg.sweep.until is not None]):
            raise ConfigError("command line", "these settings define a sweep; add -m to run it")
        settings = from_hydra(cfg, job)
        # Hydra reads run_dir=3 as a number.
        place, resume = (None if one is None else str(one) for one in (cfg.run_dir, cfg.resume))
        if resume is not None:
            if place is not None:
                raise ConfigError("run_dir", "cannot be combined with resume; leave it out")
            place = resume
            from gptattn.runs.load import load_config  # torch takes seconds to import

            recorded = load_config(expand_path(resume, "resume"), settings.allow_targets, "resume")
            settings = resume_settings(recorded, overrides, cfg)
        check(settings)

        from gptattn.machine.console import make_console

        console = make_console()
        if is_first() and "torch" not in sys.modules:
            console.print("loading torch")
        from gptattn.training.run import train

        summary = train(settings, place, console, overrides=overrides, resume=resume is not None)
        return float(summary["metrics"][LOSS])
    except Stopped as stopped:
        if stopped.signum == signal.SIGINT and not single:
            raise KeyboardInterrupt from stopped
        raise SystemExit(128 + stopped.signum) from stopped
    except Exception as error:
        if not single:
            raise
        if isinstance(error, BrokenPipeError):
            raise SystemExit(silence_stdout()) from error
        if isinstance(error, ConfigError):
            error = name_typed(error, overrides)
        # Hydra would add its own line to an error it passes on.
        raise SystemExit(report(error, SHOWS_TRACEBACK)) from error
