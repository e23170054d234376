"""The training command: turns Hydra's overrides into a checked run, and a mistake into one line.

A user's mistake is found before Hydra makes a folder. For a sweep, the sweeper in
`hydra_plugins/gptattn_sweep.py` checks the runs.
"""

import contextlib
import gc
import io
import os
import shlex
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, NoReturn

import hydra
from hydra._internal.callbacks import Callbacks
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import configure_log
from hydra.core.utils import run_job as run_as_job
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from rich.console import Console

from gptattn import command
from gptattn.cli.compose import (
    CONF,
    CONFIG_NAME,
    complaints,
    composed,
    register_resolvers,
    to_train_config,
)
from gptattn.cli.jobs import quoted, run_folder, with_paths_quoted
from gptattn.cli.launch import agreed, ended_together, joined, placed
from gptattn.cli.resume_settings import allowed_packages, resume_argument, resumed
from gptattn.errors import ConfigError, DataError, NumericError, RunFolderError
from gptattn.machine.disk import check_room, refuse_link
from gptattn.machine.lock import locked_run
from gptattn.machine.place import Place, place_here
from gptattn.machine.signals import (
    WORDS,
    Stopped,
    ending_at_once,
    handled_signals,
    stop_with_parent,
    write_stderr,
)
from gptattn.machine.untrusted import open_to_append
from gptattn.runs.folder import RunFolder
from gptattn.settings.config import TrainConfig, check

if TYPE_CHECKING:
    from gptattn.machine.world import World
    from gptattn.runs.resume import Start
    from gptattn.training.precheck import Ready

# May change when other processes go on with a run: each has its share of the CPUs.
THREADS = ("trainer.threads",)


def main(seeds: Mapping[int, Path] | None = None, *, beside_others: bool = False) -> NoReturn:
    """Run `gptattn-train` or train.py. Exits with the codes of `gptattn.errors`.

    `seeds`: train a run of each of these seeds in its folder, all as one model. `beside_others`:
    other runs share the machine.
    """
    debug = "--debug" in sys.argv
    sys.argv = [argument for argument in sys.argv if argument != "--debug"]
    sys.argv[1:] = with_paths_quoted(sys.argv[1:])
    # argparse accepts overrides only as one block, which a -m in between would split.
    sys.argv[1:] = sorted(sys.argv[1:], key=lambda argument: argument not in ("-m", "--multirun"))
    place = place_here()
    for number in handled_signals():
        interrupts = number == signal.SIGINT
        ends = partial(_terminated, speaks=place.first)
        signal.signal(number, signal.default_int_handler if interrupts else ends)
    if place.launched and "TORCHELASTIC_RUN_ID" in os.environ:
        stop_with_parent()  # torchrun, or ours: if it is killed, nobody else would stop us
    sys.exit(ended_together(partial(_main, seeds, beside_others, place), place, debug))


def _terminated(signum: int, frame: object, *, speaks: bool) -> NoReturn:
    signal.signal(signum, signal.SIG_IGN)  # ignore a second one while this one is handled
    if speaks:
        write_stderr(WORDS[signal.Signals(signum)])
    raise SystemExit(128 + signum)


def _main(seeds: Mapping[int, Path] | None, beside_others: bool, place: Place) -> None:
    register_resolvers()
    # Hydra's own handler prints several lines and exits with 1; this makes it raise errors instead.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    args = _parse_arguments()
    resume, overrides = resume_argument(args.overrides)
    if resume is not None and not (args.help or args.hydra_help):
        if args.multirun or args.cfg or args.info or args.shell_completion:
            raise ConfigError(
                "resume", "resumes one run and takes no flag but --debug; leave the others out"
            )
        _resume(Path(resume), overrides, beside_others, place)
        return
    _check_flags(args)
    if place.size > 1 and args.multirun:
        raise ConfigError(
            "command line",
            "-m makes its runs in processes of its own; start it once, without torchrun or srun",
        )
    if args.multirun or args.help or args.hydra_help or args.cfg or args.info:
        _leave_to_hydra(args)
    elif args.shell_completion:
        _hydra_main()
    elif seeds is not None:
        _run_seeds(args, seeds)
    else:
        _run(args, beside_others, place)


def _run_seeds(args: Namespace, folders: Mapping[int, Path]) -> None:
    """Make a run of each seed as one model; Hydra's own record is that of the first."""
    name = args.config_name or CONFIG_NAME
    with composed(args.overrides, name, config_dir=args.config_dir) as cfg:
        typed, first = _settings(cfg)
        ready = _ready(typed, first)
        check_room(first, len(folders) * ready.bytes_on_disk)
        with contextlib.ExitStack() as locks:
            for folder in folders.values():
                locks.enter_context(_new_run(folder))
            _as_hydras_job(cfg, first, lambda: _train_seeds(ready, folders))


def _train_seeds(ready: "Ready", folders: Mapping[int, Path]) -> None:
    """Train the seeds. Exits with the code of a NaN if one has diverged; its log says so."""
    with ending_at_once():
        from gptattn.machine.console import make_console
        from gptattn.training.vectorized import train_seeds

    first, *others = folders.values()
    log = Path("..", first.name, RunFolder(first).console_file.name)
    for folder in others:
        _log(folder, f"trained as one model with others; its log: {log}")
    try:
        errors = train_seeds(ready, folders, make_console())
    except Stopped as stopped:
        print(f"stopped after step {stopped.step}", file=sys.stderr)
        raise SystemExit(128 + stopped.signum) from stopped
    for seed, error in errors.items():
        _log(folders[seed], f"error: {error}")
    if errors:
        raise SystemExit(NumericError.exit_code)


def _log(folder: Path, line: str) -> None:
    with open_to_append(RunFolder(folder).console_file) as file:
        file.write(f"{line}\n".encode())


def _run(args: Namespace, beside_others: bool, place: Place) -> None:
    """Make one run, from its overrides to its summary; the config is composed only once."""
    name = args.config_name or CONFIG_NAME
    with composed(args.overrides, name, config_dir=args.config_dir) as cfg:
        typed, folder = _settings(cfg, place)
        world = joined(typed, place)
        ready = agreed(world, world.together(lambda: _ready(typed, folder)))
        of_all = world.of_first(folder.absolute())  # a folder's name has a random part
        folder = folder if world.first else of_all
        with contextlib.ExitStack() as lock:
            # Check the folder first: Hydra would write into it without a check.
            world.together(lambda: world.first and lock.enter_context(_new_run(folder)))
            run = partial(
                _train_and_report,
                ready,
                folder.absolute(),
                beside_others=beside_others,
                world=world,
            )
            _as_hydras_job(cfg, folder, run, records=world.first)


def _as_hydras_job(
    cfg: DictConfig, folder: Path, task: Callable[[], object], *, records: bool = True
) -> None:
    """Run the task as a Hydra job: with its record in .hydra/, its logging and its environment.

    `folder` is the folder that `hydra.run.dir` gave. It is written back into the config, since its
    random part must not be resolved again. `records` false: another process writes .hydra/.
    """
    mode = [] if cfg.hydra.mode else ["hydra.mode=RUN"]
    with read_write(cfg.hydra), open_dict(cfg.hydra):
        cfg.hydra.run.dir, cfg.hydra.mode = str(folder), RunMode.RUN
        cfg.hydra.overrides.hydra += [f"hydra.run.dir={quoted(str(folder))}", *mode]
        cfg.hydra.output_subdir = cfg.hydra.output_subdir if records else None
    configure_log(cfg.hydra.hydra_logging, cfg.hydra.verbose)
    context = HydraContext(GlobalHydra.instance().config_loader(), Callbacks())
    done = run_as_job(
        task_function=lambda _: task(),
        config=cfg,
        job_dir_key="hydra.run.dir",
        job_subdir_key=None,
        hydra_context=context,
    )
    # Not `done.return_value`: it prints a line of Hydra's before it raises.
    if isinstance(done._return_value, Exception):
        raise done._return_value


def _leave_to_hydra(args: Namespace) -> None:
    """Let Hydra run a sweep or show the settings, after a check that they compose."""
    if not args.hydra_help:
        # The sweeper checks each run, but only after Hydra has composed the settings they share.
        name, mode = args.config_name or CONFIG_NAME, RunMode.MULTIRUN
        mode = mode if args.multirun else RunMode.RUN
        with composed(args.overrides, name, mode, args.config_dir) as cfg:
            part = args.package not in (None, "_global_")
            if part and not OmegaConf.is_config(OmegaConf.select(cfg, args.package)):
                raise ConfigError("--package", f"{args.package!r} is not a part of the settings")
    with _wrapped() if args.help else contextlib.nullcontext():
        _hydra_main()


@contextlib.contextmanager
def _wrapped() -> Iterator[None]:
    """Break the lines of the help: Hydra puts all choices of a group on one."""
    text = io.StringIO()
    try:
        with contextlib.redirect_stdout(text):
            yield
    finally:
        for line in text.getvalue().splitlines():
            print(line if len(line) <= 80 else fill(line, 80, subsequent_indent="    "))


def _hydra_main() -> None:
    with complaints():
        hydra.main(version_base="1.3", config_path=str(CONF), config_name=CONFIG_NAME)(run_job)()


@contextlib.contextmanager
def _new_run(folder: Path) -> Iterator[None]:
    """Lock the folder of a new run. Raises RunFolderError if it already holds one."""
    with locked_run(folder, "hydra.run.dir"):
        if RunFolder(folder).begun:
            raise RunFolderError(
                "hydra.run.dir",
                f"{folder} already holds a run; resume it with resume=..., or give another folder",
            )
        hydras = folder / ".hydra"  # Hydra would follow links there
        for place in (hydras, *hydras.glob("*")):
            refuse_link(place)
        yield


def _parse_arguments() -> Namespace:
    parser = get_args_parser()

    def complain(message: str) -> NoReturn:
        late = message.removeprefix("unrecognized arguments: ")
        if late != message and not late.startswith("-"):
            # argparse takes the settings as one block; a flag between them ends it.
            raise ConfigError(
                "command line", f"settings stand on both sides of a flag ({late}); give flags first"
            )
        raise ConfigError("command line", f"{message}; see --help")

    parser.error = complain
    return parser.parse_args()


def run_job(cfg: DictConfig) -> float:
    """Train one run of a sweep as Hydra's job in this process; return its validation loss."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    with locked_run(folder, "hydra.run.dir"):
        typed = placed(to_train_config(cfg), Place())
        with ending_at_once():
            from gptattn.training.precheck import check_run
        loss = _train_and_report(check_run(typed), folder)
    # Trainer, model and callbacks form reference cycles: without this, finished runs would stay in
    # memory while the next one of this process trains.
    gc.collect()
    return loss


def _resume(folder: Path, overrides: Sequence[str], beside_others: bool, place: Place) -> None:
    """Resume the run in the folder with its recorded settings, changed by the overrides."""
    # torch and lightning take seconds to import: do so only once the command is known to be good.
    with ending_at_once():
        from gptattn.runs.load import load_config, with_kept_tokenizer
        from gptattn.runs.resume import find_start, start_at

    recorded = load_config(folder, allowed_packages(overrides))
    # Of the threads, the checkpoint knows whether they may change; it is chosen in one process.
    world = joined(placed(resumed(recorded, overrides, None, free=THREADS), place), place)
    with contextlib.ExitStack() as lock:
        world.together(lambda: world.first and lock.enter_context(locked_run(folder, "resume")))
        found = world.together(lambda: find_start(folder, recorded) if world.first else None)
        source = world.of_first(None if found is None else found.source)
        start = world.together(lambda: found or start_at(source))
        others = start.facts.get("processes", world.size) != world.size
        free = THREADS if others else ()
        cfg = placed(resumed(recorded, overrides, start.threads(world.size), free=free), place)
        if cfg.tokenizer == recorded.tokenizer:
            cfg = world.together(partial(with_kept_tokenizer, cfg, RunFolder(folder)))
        ready = agreed(world, world.together(partial(_ready_again, cfg, start)))
        _train_and_report(ready, folder, start, beside_others, world)


def _ready_again(cfg: TrainConfig, start: "Start") -> "Ready":
    from gptattn.training.precheck import check_run

    try:
        return check_run(cfg, resumed=start.source is not None)
    except DataError as error:
        hint = "; if the text has moved, add data.path=..."
        raise DataError(error.field, error.message + hint) from None


def _train_and_report(
    ready: "Ready",
    folder: Path,
    start: "Start | None" = None,
    beside_others: bool = False,
    world: "World | None" = None,
) -> float:
    # torch and lightning take seconds to import: do so only once the settings are checked.
    with ending_at_once():
        from gptattn.machine.console import make_console
        from gptattn.machine.world import ALONE
        from gptattn.training.train import train_ready

    shown = os.path.relpath(folder)
    world = world or ALONE
    console = make_console() if world.first else Console(quiet=True)
    try:
        summary = train_ready(
            ready, folder, console, start, beside_others=beside_others, world=world
        )
    except Stopped as stopped:
        held = f"step {stopped.step}" if stopped.saved else "what was logged"
        if world.first:
            print(_resume_hint(shown, held, stopped.saved), file=sys.stderr)
        if stopped.signum == signal.SIGINT:
            raise KeyboardInterrupt from stopped
        raise SystemExit(128 + stopped.signum) from stopped
    except (SystemExit, KeyboardInterrupt, BrokenPipeError) as error:
        if world.first and ready.cfg.checkpoint and RunFolder(folder).begun:
            print(_resume_hint(shown, "its newest checkpoint, if any", True), file=sys.stderr)
        # Lightning turns Ctrl-C into SystemExit(1), which would look like an ordinary failure.
        if isinstance(error.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from error
        raise
    # A folder name may hold brackets, which rich would read as markup.
    console.print(f"run: {shown}", markup=False)
    parent = shlex.quote(os.path.relpath(folder.parent))
    console.print(f"look: tensorboard --logdir {parent}", markup=False)
    return float(summary["metrics"]["val/loss"])


def _resume_hint(shown: str, held: str, resumes: bool) -> str:
    how = f"; to resume: {command('train')} resume={shlex.quote(shown)}" if resumes else ""
    return f"{shown} holds {held}{how}"


def _check_flags(args: Namespace) -> None:
    """Raise ConfigError for flags that exclude each other or are not supported."""
    if args.shell_completion and not any(
        override.startswith(("install=", "uninstall=", "query=")) for override in args.overrides
    ):
        raise ConfigError(
            "-sc", "needs install=SHELL or uninstall=SHELL; SHELL is bash, zsh or fish"
        )
    one = (args.multirun, args.cfg, args.info, args.shell_completion, args.run)
    if sum(map(bool, one)) > 1:
        raise ConfigError(
            "command line", "--run, --multirun, --cfg, --info and -sc exclude each other; give one"
        )
    if args.hydra_help or args.shell_completion:
        return
    if args.experimental_rerun is not None:
        raise ConfigError(
            "--experimental-rerun",
            "reads a pickle, which may run any code; give the overrides instead",
        )
    if args.config_path is not None:
        raise ConfigError(
            "--config-path", "would hide the settings; use --config-dir to add a folder"
        )
    if args.config_dir is not None and not Path(args.config_dir).exists():
        raise ConfigError(
            "--config-dir", f"{args.config_dir} does not exist; give a folder that does"
        )
    if args.resolve and not (args.cfg or args.help):
        raise ConfigError("--resolve", "works only with --cfg or --help; leave it out")


def check_job(overrides: Sequence[str], config_name: str = CONFIG_NAME) -> TrainConfig:
    """Return the checked settings of a run; raise a UserError if it could not start training."""
    with composed(overrides, config_name) as cfg:
        return _ready(*_settings(cfg)).cfg


def _settings(cfg: DictConfig, place: Place | None = None) -> tuple[TrainConfig, Path]:
    """Return the config's settings and folder; raise a UserError for what torch need not find."""
    sweeps = any(OmegaConf.select(cfg, f"hydra.sweeper.{name}") for name in ("params", "variants"))
    if sweeps and cfg.hydra.mode is None:
        raise ConfigError("command line", "these settings define a sweep; add -m")
    if cfg.hydra.mode == RunMode.MULTIRUN:
        raise ConfigError("hydra.mode", "MULTIRUN makes a sweep; give -m instead")
    if cfg.hydra.job.chdir:
        raise ConfigError("hydra.job.chdir", "would move relative paths; leave it out")
    typed, place = to_train_config(cfg), place or Place()
    check(typed)
    typed = placed(typed, place)
    folder = run_folder(cfg)
    if place.size == 1 and RunFolder(folder).begun:
        with _new_run(folder):
            pass
    return typed, folder


def _ready(typed: TrainConfig, folder: Path) -> "Ready":
    """Return the checked run of these settings; raise a UserError if it cannot start."""
    # torch takes seconds to import, so what needs it comes last.
    with ending_at_once():
        from gptattn.training.precheck import check_run

    ready = check_run(typed)
    check_room(folder, ready.bytes_on_disk)
    return ready
