"""The command line: Hydra's overrides in, a checked run out, and one line for a mistake.

All that a user can get wrong is found before Hydra makes a folder, for every job of a sweep.
"""

import difflib
import errno
import os
import re
import secrets
import signal
import sys
import traceback
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from gptattn.config import TrainConfig, check, suggest
from gptattn.errors import ConfigError, DiskError, UserError

CONFIG_NAME = "train"
# Beside the package in a source tree, inside of it in a wheel.
CONF = next(
    folder
    for folder in (Path(__file__).parent / "conf", Path(__file__).parents[1] / "conf")
    if folder.is_dir()
)
# Overrides that do not belong in a run's name: said elsewhere in it, or no matter of the result.
UNNAMED = re.compile(
    r"(attn|seed|experiment|experiment_name|log_every|checkpoint|cache_dir|allow_targets)=|"
    r"(hydra|trainer|sample|data|budget|validation)[./=]"
)
DISK_ERRORS = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ENAMETOOLONG,
}


def main() -> NoReturn:
    """`gptattn-train`, and what train.py calls. Exits with the codes of `gptattn.errors`."""
    debug = "--debug" in sys.argv
    sys.argv = [argument for argument in sys.argv if argument != "--debug"]
    signal.signal(signal.SIGTERM, _terminated)
    try:
        code = _main()
    except Exception as error:
        code = _report(error, debug)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    sys.exit(code)


def _terminated(signum: int, frame: object) -> NoReturn:
    print("terminated", file=sys.stderr)
    raise SystemExit(143)


def _main() -> int:
    OmegaConf.register_new_resolver("run_name", run_name, use_cache=True, replace=True)
    # Hydra's own handler prints several lines and exits with 1; with this it lets errors through.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    args = get_args_parser().parse_args()
    asks_only = args.help or args.hydra_help or args.cfg or args.info or args.shell_completion
    jobs = 0 if asks_only else check_jobs(args)
    codes: list[int] = []
    folders: list[Path] = []

    def task(cfg: DictConfig) -> None:
        folders.append(Path(HydraConfig.get().runtime.output_dir))
        codes.append(_run_job(cfg, folders[-1], len(codes), jobs))

    hydra.main(version_base="1.3", config_path=str(CONF), config_name=CONFIG_NAME)(task)()
    if jobs > 1:
        _print_sweep(folders, codes)
    return next((code for code in codes if code), 0)


def _print_sweep(folders: Sequence[Path], codes: Sequence[int]) -> None:
    """The sweep's runs in one table; how many failed."""
    from gptattn.compare.runs import read_runs
    from gptattn.compare.table import terminal_table
    from gptattn.console import make_console

    done = [folder for folder, code in zip(folders, codes, strict=True) if code == 0]
    if done:
        make_console().print(terminal_table(read_runs(done)[0], f"{len(done)} runs"))
    if len(done) < len(codes):
        print(f"{len(codes) - len(done)} of {len(codes)} runs failed", file=sys.stderr)


def _run_job(cfg: DictConfig, folder: Path, index: int, total: int) -> int:
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
            raise KeyboardInterrupt from error
        raise
    except Exception as error:
        return _report(error, debug=False)
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
        check_job(job, name)
    return len(jobs)


def check_job(overrides: Sequence[str], config_name: str = CONFIG_NAME) -> TrainConfig:
    """Raise a UserError for whatever would stop this run before its first step."""
    with composed(overrides, config_name) as cfg:
        typed = to_train_config(cfg)
    check(typed)
    # torch takes seconds to import, so what needs it comes last.
    from gptattn.precheck import check_buildable

    check_buildable(typed)
    return typed


@contextmanager
def composed(
    overrides: Sequence[str], config_name: str = CONFIG_NAME, run_mode: RunMode = RunMode.RUN
) -> Iterator[DictConfig]:
    """The config of one job, hydra's node included, while `${hydra:...}` resolves to it."""
    OmegaConf.register_new_resolver("run_name", run_name, use_cache=True, replace=True)
    before = HydraConfig.instance().cfg
    with hydra.initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        cfg = _load(overrides, config_name, run_mode)
        HydraConfig.instance().set_config(cfg)
        try:
            yield cfg
        finally:
            HydraConfig.instance().cfg = before


def _load(overrides: Sequence[str], config_name: str, run_mode: RunMode) -> DictConfig:
    try:
        loader = GlobalHydra.instance().config_loader()
        return loader.load_configuration(config_name, list(overrides), run_mode)
    except HydraException as error:
        raise _from_hydra(error, overrides) from error


def sweep_overrides(overrides: Sequence[str], config_name: str) -> Iterator[list[str]]:
    """The override lists of a sweep's jobs, as Hydra's basic sweeper will make them."""
    with composed(overrides, config_name, RunMode.MULTIRUN) as cfg:
        if cfg.hydra.runtime.choices["hydra/sweeper"] != "basic":
            return
        params = [f"{key}={value}" for key, value in (cfg.hydra.sweeper.params or {}).items()]
        parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
        parsed = parser.parse_overrides([*params, *overrides])
        for batch in BasicSweeper.split_arguments(parsed, None):
            yield from batch


def to_train_config(cfg: DictConfig) -> TrainConfig:
    """The typed settings of a composed config. Raises for a value of the wrong type."""
    settings = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
    OmegaConf.resolve(settings)
    OmegaConf.set_struct(settings, False)
    typed = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(TrainConfig), settings))
    assert isinstance(typed, TrainConfig)
    return typed


def run_name(variant: str, seed: int, overrides: ListConfig) -> str:
    """`<variant>[,key=value...]_s<seed>_<id>`: readable in TensorBoard, and never given twice."""
    named = [str(o).lstrip("+~") for o in overrides if not UNNAMED.match(str(o).lstrip("+~"))]
    settings = "".join("," + override for override in named)
    safe = re.sub(r"[^\w.,=+-]", "-", settings)[:80]
    return f"{variant}{safe}_s{seed}_{secrets.token_hex(3)}"


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


def as_user_error(error: BaseException) -> UserError | None:
    """What OmegaConf or the disk complain of, in our form; None for a bug of ours."""
    if isinstance(error, UserError):
        return error
    if isinstance(error, OmegaConfBaseException):
        field = error.full_key or error.key or "config"
        if isinstance(error, MissingMandatoryValue):
            return ConfigError(str(field), "is missing; give a value")
        return ConfigError(str(field), (error.msg or str(error)).splitlines()[0])
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        return DiskError(
            str(error.filename or "disk"), f"{error.strerror}; make room or give another folder"
        )
    if isinstance(error, MemoryError) or "not enough memory" in str(error):
        return ConfigError("memory", "too little for this run; a smaller batch_size or model")
    return None


def _from_hydra(error: HydraException, overrides: Sequence[str]) -> UserError:
    """What Hydra says of these overrides, in our form."""
    if isinstance(error, MissingConfigException):
        group, _, choice = (error.missing_cfg_file or "").rpartition("/")
        known = suggest(choice, error.options or [])
        return ConfigError(group or "config", f"{choice!r} is unknown; {known}")
    if isinstance(error, OverrideParseException):
        return ConfigError(
            error.override, "cannot be read; write name=value, quoted if it has odd characters"
        )
    message, cause = str(error), error.__cause__
    match = re.search(r"Could not (?:override|delete|append)[^']*'([^']+)'", message)
    if match is None and isinstance(cause, OmegaConfBaseException):
        known = as_user_error(cause)
        assert known is not None
        return known
    if "already at" in message and match is not None:
        return ConfigError(match.group(1), f"is there already; {match.group(1)}=... without the +")
    if match is None:
        return ConfigError("command line", message)
    return _unknown_key(match.group(1), overrides)


def _unknown_key(key: str, overrides: Sequence[str]) -> ConfigError:
    # The choices of groups decide which settings there are.
    choices = [o for o in overrides if re.match(r"[\w/]+=", o) and not o.startswith(f"{key}=")]
    GlobalHydra.instance().clear()  # the composition that failed is still open
    with composed(choices) as cfg:
        keys = [name for name in _dotted_keys(cfg) if not name.startswith("hydra.")]
    parent = key.rpartition(".")[0]
    siblings = [name for name in keys if parent and name.startswith(f"{parent}.")]
    if siblings:
        return ConfigError(key, f"is no setting; {suggest(key, siblings)}")
    near = difflib.get_close_matches(key, keys, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}? " if near else ""
    return ConfigError(key, f"is no setting; {hint}--help lists them all")


def _dotted_keys(node: Any, prefix: str = "") -> Iterator[str]:
    for key in node:
        name = f"{prefix}{key}"
        yield name
        child = node._get_node(key)
        if isinstance(child, DictConfig) and not child._is_none():
            yield from _dotted_keys(child, f"{name}.")
