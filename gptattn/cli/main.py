"""The command line: Hydra's overrides in, a checked run out, and one line for a mistake.

All that a user can get wrong is found before Hydra makes a folder; for a sweep by the sweeper in
`hydra_plugins/gptattn_sweep.py`.
"""

import contextlib
import gc
import os
import re
import shlex
import signal
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from gptattn import command
from gptattn.cli.compose import (
    CONF,
    CONFIG_NAME,
    as_user_error,
    composed,
    quoted,
    register_resolvers,
    run_folder,
    to_train_config,
    with_paths_quoted,
)
from gptattn.cli.resume_settings import allowed_packages, resume_argument, resumed
from gptattn.errors import ConfigError, DataError, ForeignError, RunFolderError
from gptattn.machine.disk import check_room, refuse_link
from gptattn.machine.lock import locked_run
from gptattn.machine.signals import (
    WORDS,
    Stopped,
    ending_at_once,
    heeded,
    open_output,
    reader_gone,
    tell,
)
from gptattn.runs.folder import RunFolder
from gptattn.settings.config import TrainConfig, check

if TYPE_CHECKING:
    from gptattn.runs.resume import Start

# What a hint tells to type: a wheel has no train.py.
LONGEST_LINE = 900  # characters of an error; its end says what would be right


def main() -> NoReturn:
    """`gptattn-train`, and what train.py calls. Exits with the codes of `gptattn.errors`."""
    debug = "--debug" in sys.argv
    sys.argv = [argument for argument in sys.argv if argument != "--debug"]
    sys.argv[1:] = with_paths_quoted(sys.argv[1:])
    # argparse takes overrides in one run only: a flag between two of them would end it.
    sys.argv[1:] = sorted(sys.argv[1:], key=lambda argument: argument not in ("-m", "--multirun"))
    for number in heeded():
        interrupts = number == signal.SIGINT
        signal.signal(number, signal.default_int_handler if interrupts else _terminated)
    sys.exit(ended(_main, debug))


def ended(run: Callable[[], int | None], debug: bool = False) -> int:
    """Run a command; its exit code: what it returns, or that of the error that it raises."""
    open_output()
    try:
        try:
            code = run()
        except SystemExit as end:  # after Hydra's help, or a signal
            code = int(end.code or 0)
        sys.stdout.flush()
    except BrokenPipeError:
        return reader_gone()
    except Exception as error:
        return report(error, debug)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return code or 0


def _terminated(signum: int, frame: object) -> NoReturn:
    signal.signal(signum, signal.SIG_IGN)  # once is enough
    tell(WORDS[signal.Signals(signum)])
    raise SystemExit(128 + signum)


def _main() -> None:
    register_resolvers()
    # Hydra's own handler prints several lines and exits with 1; with this it lets errors through.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    args = _parse_arguments()
    resume, overrides = resume_argument(args.overrides)
    if resume is not None and not (args.help or args.hydra_help):
        if args.multirun or args.cfg or args.info or args.shell_completion:
            raise ConfigError("resume", "goes on with one run, and takes no flag beside --debug")
        _resume(Path(resume), overrides)
        return
    folder = _check_command(args)
    failures: list[Exception] = []

    def run_one(cfg: DictConfig) -> None:
        # Past Hydra, which would add words of its own.
        try:
            run_job(cfg, locks=folder is None)
        except Exception as error:
            failures.append(error)

    task = run_job if args.multirun else run_one
    with contextlib.ExitStack() as stack:
        if folder is not None:
            # Before Hydra, which writes into the folder first and asks later; and the name, which
            # has a random part, is settled with that.
            stack.enter_context(_new_run(folder))
            # Beside the other overrides: argparse takes them in one run only.
            last = sys.argv[::-1].index(args.overrides[-1]) if args.overrides else 0
            sys.argv.insert(len(sys.argv) - last, f"hydra.run.dir={quoted(str(folder))}")
        hydra.main(version_base="1.3", config_path=str(CONF), config_name=CONFIG_NAME)(task)()
    if failures:
        raise failures[0]


@contextlib.contextmanager
def _new_run(folder: Path) -> Iterator[None]:
    """Hold a folder that has no run in it. Raises RunFolderError where it has one."""
    with locked_run(folder, "hydra.run.dir"):
        if RunFolder(folder).begun:
            raise RunFolderError(
                "hydra.run.dir",
                f"{folder} already holds a run; resume=... goes on with it, or give another folder",
            )
        hydras = folder / ".hydra"  # written without a look
        for place in (hydras, *hydras.glob("*")):
            refuse_link(place)
        yield


def _parse_arguments() -> Namespace:
    parser = get_args_parser()

    def complain(message: str) -> NoReturn:
        raise ConfigError("command line", f"{message}; see --help")

    parser.error = complain
    return parser.parse_args()


def run_job(cfg: DictConfig, locks: bool = True) -> float:
    """Train one run, as Hydra's task; return its final validation loss.

    `locks`: nobody holds its folder yet.
    """
    folder = Path(HydraConfig.get().runtime.output_dir)
    with locked_run(folder, "hydra.run.dir") if locks else contextlib.nullcontext():
        loss = _train_and_tell(to_train_config(cfg), folder)
    if locks:
        # Trainer, model and callbacks refer to each other in circles: of several runs in one
        # process, those that are over would pile up.
        gc.collect()
    return loss


def _resume(folder: Path, overrides: Sequence[str]) -> None:
    """Go on with the run in the folder; its settings are its own."""
    # torch and lightning take seconds to import: not before the command is known to be good.
    with ending_at_once():
        from gptattn.runs.load import load_config
        from gptattn.runs.resume import find_start
        from gptattn.training.precheck import check_run

    recorded = load_config(folder, allowed_packages(overrides))
    resumed(recorded, overrides, None)
    with locked_run(folder, "resume"):
        start = find_start(folder, recorded)
        cfg = resumed(recorded, overrides, start.facts.get("threads"))
        try:
            check_run(replace(cfg, init_from=None))  # the weights are the checkpoint's
        except DataError as error:
            hint = "; resume takes data.path=... where the text has moved"
            raise DataError(error.field, error.message + hint) from None
        _train_and_tell(cfg, folder, start)


def _train_and_tell(cfg: TrainConfig, folder: Path, start: "Start | None" = None) -> float:
    # torch and lightning take seconds to import: not before the settings are known to be good.
    with ending_at_once():
        from gptattn.machine.console import make_console
        from gptattn.training.train import train

    shown = os.path.relpath(folder)
    console = make_console()
    try:
        summary = train(cfg, folder, console, start)
    except Stopped as stopped:
        held = f"step {stopped.step}" if stopped.saved else "what was logged"
        print(_how_to_go_on(shown, held, stopped.saved), file=sys.stderr)
        if stopped.signum == signal.SIGINT:
            raise KeyboardInterrupt from stopped
        raise SystemExit(128 + stopped.signum) from stopped
    except (SystemExit, KeyboardInterrupt, BrokenPipeError) as error:
        if cfg.checkpoint and RunFolder(folder).begun:
            print(_how_to_go_on(shown, "its newest checkpoint, if any", True), file=sys.stderr)
        # Lightning turns Ctrl-C into SystemExit(1), which would look like an end.
        if isinstance(error.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from error
        raise
    # A name may hold brackets, which are markup to the console.
    console.print(f"run: {shown}", markup=False)
    parent = shlex.quote(os.path.relpath(folder.parent))
    console.print(f"look: tensorboard --logdir {parent}", markup=False)
    return float(summary["metrics"]["val/loss"])


def _how_to_go_on(shown: str, held: str, goes_on: bool) -> str:
    how = f"; {command('train')} resume={shlex.quote(shown)} goes on" if goes_on else ""
    return f"{shown} holds {held}{how}"


def _check_command(args: Namespace) -> Path | None:
    """Raise a UserError for what would stop this run; of a sweep, for what composes in no run.

    Returns the folder of a single run.
    """
    if args.shell_completion and not any(
        override.startswith(("install=", "uninstall=", "query=")) for override in args.overrides
    ):
        raise ConfigError("-sc", "takes install=SHELL or uninstall=SHELL; bash, zsh or fish")
    if sum(map(bool, (args.multirun, args.cfg, args.info, args.shell_completion))) > 1:
        raise ConfigError("command line", "--multirun, --cfg, --info and -sc go one at a time")
    if args.hydra_help or args.shell_completion:
        return None
    if args.experimental_rerun is not None:
        raise ConfigError(
            "--experimental-rerun", "reads a pickle, which may run anything; give the overrides"
        )
    if args.config_path is not None:
        raise ConfigError("--config-path", "would hide the settings; --config-dir adds a folder")
    if args.config_dir is not None and not Path(args.config_dir).exists():
        raise ConfigError("--config-dir", f"{args.config_dir} does not exist; give one that does")
    overrides = list(args.overrides)
    if args.config_dir is not None:
        overrides.append(f"hydra.searchpath=[file://{Path(args.config_dir).absolute()}]")
    name = args.config_name or CONFIG_NAME
    if args.multirun or args.help or args.cfg or args.info:
        # A sweeper checks each of its runs; by then Hydra must have composed what they share.
        with composed(overrides, name, RunMode.MULTIRUN if args.multirun else RunMode.RUN) as cfg:
            part = args.package not in (None, "_global_")
            if part and not OmegaConf.is_config(OmegaConf.select(cfg, args.package)):
                raise ConfigError("--package", f"{args.package!r} is no part of the settings")
            return None
    return _checked(overrides, name)[1]


def check_job(overrides: Sequence[str], config_name: str = CONFIG_NAME) -> TrainConfig:
    """Raise a UserError for whatever would stop this run before its first step."""
    return _checked(overrides, config_name)[0]


def _checked(overrides: Sequence[str], config_name: str) -> tuple[TrainConfig, Path]:
    with composed(overrides, config_name) as cfg:
        if OmegaConf.select(cfg, "hydra.sweeper.params") and cfg.hydra.mode is None:
            raise ConfigError("command line", "these settings are a sweep's; add -m")
        if cfg.hydra.job.chdir:
            raise ConfigError("hydra.job.chdir", "would move relative paths; leave it out")
        typed = to_train_config(cfg)
        check(typed)
        folder = run_folder(cfg)
    if RunFolder(folder).begun:
        with _new_run(folder):
            pass
    # torch takes seconds to import, so what needs it comes last.
    with ending_at_once():
        from gptattn.training.precheck import check_run

    ready = check_run(typed)
    if folder is not None:
        check_room(folder, ready.bytes_on_disk)
    return ready.cfg, folder


def _packages(arguments: Sequence[str]) -> list[str]:
    """What `allow_targets=` says, however it is written: of this an error must not come."""
    given = [a.partition("=")[2] for a in arguments if re.match(r"\+*allow_targets=", a)]
    return re.findall(r"[\w.]+", " ".join(given))


def report(error: Exception, debug: bool = False) -> int:
    """One line on stderr for a user's mistake, a traceback for ours; return the exit code."""
    packages = _packages(sys.argv)
    known = as_user_error(error, packages)
    if debug or known is None:
        traceback.print_exception(error)
    message = str(known)
    if known is None:
        what = str(error).strip().partition("\n")[0][:200]
        unless = f"if it is none of {', '.join(packages)}, " if packages else ""
        message = (
            f"internal: {type(error).__name__}{': ' * bool(what)}{what}; {unless}please report it"
        )
    if isinstance(known, ForeignError) and not debug:
        message += "; --debug shows the traceback"
    line = re.sub(r"\s*[\r\n]\s*", " ", message).strip()
    # What was given is told again; a terminal must not obey what is in it.
    line = "".join(c if c.isprintable() else "\ufffd" for c in line)
    if len(line) > LONGEST_LINE:
        line = f"{line[: LONGEST_LINE * 2 // 3]} … {line[-LONGEST_LINE // 3 :]}"
    print(f"error: {line}", file=sys.stderr)
    return 1 if known is None else known.exit_code
