"""The command line: Hydra's overrides in, a checked run out, and one line for a mistake.

All that a user can get wrong is found before Hydra makes a folder, for every job of a sweep.
"""

import os
import re
import signal
import sys
import traceback
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from gptattn.compose import (
    CONF,
    CONFIG_NAME,
    as_user_error,
    composed,
    register_resolvers,
    run_folder,
    sweep_overrides,
    to_train_config,
)
from gptattn.config import TrainConfig, check
from gptattn.errors import ConfigError, RunFolderError


def main() -> NoReturn:
    """`gptattn-train`, and what train.py calls. Exits with the codes of `gptattn.errors`."""
    debug = "--debug" in sys.argv
    sys.argv = [argument for argument in sys.argv if argument != "--debug"]
    # argparse takes overrides in one run only: a flag between two of them would end it.
    sys.argv[1:] = sorted(sys.argv[1:], key=lambda argument: argument not in ("-m", "--multirun"))
    signal.signal(signal.SIGTERM, _terminated)
    try:
        code = _main(debug)
    except Exception as error:
        code = _report(error, debug)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    sys.exit(code)


def _terminated(signum: int, frame: object) -> NoReturn:
    print("terminated", file=sys.stderr)
    raise SystemExit(143)


def _main(debug: bool) -> int:
    register_resolvers()
    # Hydra's own handler prints several lines and exits with 1; with this it lets errors through.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    args = _parse_arguments()
    asks_only = args.help or args.hydra_help or args.cfg or args.info or args.shell_completion
    jobs = 0 if asks_only else check_jobs(args)
    codes: list[int] = []
    folders: list[Path] = []

    def task(cfg: DictConfig) -> None:
        folders.append(Path(HydraConfig.get().runtime.output_dir))
        codes.append(_run_job(cfg, folders[-1], len(codes), jobs, debug))

    hydra.main(version_base="1.3", config_path=str(CONF), config_name=CONFIG_NAME)(task)()
    if jobs > 1:
        _print_sweep(folders, codes)
    return next((code for code in codes if code), 0)


def _parse_arguments() -> Namespace:
    parser = get_args_parser()

    def complain(message: str) -> NoReturn:
        raise ConfigError("command line", f"{message}; see --help")

    parser.error = complain
    return parser.parse_args()


def _print_sweep(folders: Sequence[Path], codes: Sequence[int]) -> None:
    """The sweep's runs in one table; how many failed."""
    from gptattn.compare.runs import read_runs
    from gptattn.compare.table import terminal_table
    from gptattn.console import make_console

    done = [folder for folder, code in zip(folders, codes, strict=True) if code == 0]
    if done:
        console = make_console()
        console.print(terminal_table(read_runs(done)[0], f"{len(done)} runs", console.width))
    if len(done) < len(codes):
        print(f"{len(codes) - len(done)} of {len(codes)} runs failed", file=sys.stderr)


def _run_job(cfg: DictConfig, folder: Path, index: int, total: int, debug: bool) -> int:
    """Train one job. A failure is reported here and does not end a sweep; an interrupt does."""
    # torch and lightning take seconds to import: not before the settings are known to be good.
    from gptattn.console import make_console
    from gptattn.run import train

    shown = os.path.relpath(folder)
    console = make_console()
    if total > 1:
        console.rule(f"run {index + 1} of {total}: {folder.name}", align="left")
    try:
        train(to_train_config(cfg), folder, console)
    except SystemExit as error:
        # Lightning turns Ctrl-C into SystemExit(1), which would end a sweep as if it were done.
        if error.code == 1:
            print(f"{shown} holds what was logged until here", file=sys.stderr)
            raise KeyboardInterrupt from error
        raise
    except Exception as error:
        return _report(error, debug)
    console.print(f"run: {shown}")
    console.print(f"look: tensorboard --logdir {os.path.relpath(folder.parent)}")
    return 0


def check_jobs(args: Namespace) -> int:
    """Compose and check every job of the command line; return how many there are."""
    overrides = list(args.overrides)
    if args.config_dir is not None:
        overrides.append(f"hydra.searchpath=[file://{Path(args.config_dir).absolute()}]")
    name = args.config_name or CONFIG_NAME
    jobs = list(sweep_overrides(overrides, name)) if args.multirun else [overrides]
    for job in jobs:
        check_job(job, name, multirun=args.multirun)
    return len(jobs)


def check_job(
    overrides: Sequence[str], config_name: str = CONFIG_NAME, multirun: bool = False
) -> TrainConfig:
    """Raise a UserError for whatever would stop this run before its first step."""
    with composed(overrides, config_name) as cfg:
        typed = to_train_config(cfg)
        folder = run_folder(cfg, multirun)
    # train() claims the folder; but by then Hydra has written its own files into it.
    if folder is not None and (folder / "config.yaml").exists():
        raise RunFolderError("hydra.run.dir", f"{folder} already holds a run; give another folder")
    check(typed)
    # torch takes seconds to import, so what needs it comes last.
    from gptattn.precheck import check_buildable

    check_buildable(typed)
    return typed


def _report(error: Exception, debug: bool) -> int:
    """One line on stderr for a user's mistake, a traceback for ours; return the exit code."""
    known = as_user_error(error)
    if debug or known is None:
        traceback.print_exception(error)
    if known is None:
        print(f"error: internal: {type(error).__name__}; please report it", file=sys.stderr)
        return 1
    print("error: " + re.sub(r"\s*\n\s*", " ", str(known)).strip(), file=sys.stderr)
    return known.exit_code
