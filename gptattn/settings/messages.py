"""Hydra's errors about a command line, in one line that names the field and what would be right."""

import contextlib
import difflib
import re
import traceback
from collections.abc import Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gptattn.errors import ConfigError, UserError
from gptattn.settings.values import dotted, from_omegaconf, suggest

GROUPS = r"\+*(attn|part|model|position|tokenizer|data|optim|trainer|logger|block|experiment)="


def from_hydra_error(error: Exception, overrides: Sequence[str], conf: Path) -> Exception:
    """Return the UserError for Hydra's or OmegaConf's error; any other error as it is.

    `overrides` are the command line's, `conf` the folder of the config files.
    """
    if isinstance(error, UserError):
        return error
    if isinstance(error, OmegaConfBaseException):
        return from_omegaconf(error)
    if isinstance(error, MissingConfigException):
        return _no_such_choice(error, overrides, conf)
    if isinstance(error, OverrideParseException):
        how = "cannot be read; write name=value, or 'name=\"value\"' for special characters"
        return ConfigError(error.override, how)
    if not isinstance(error, HydraException):
        # Hydra asserts some things, such as that a choice is no number, and names no setting.
        return _refused(error, overrides, conf) if _from_hydra_itself(error) else error
    message, cause = str(error), error.__cause__
    key = re.search(r"Could not (override|delete|append)[^']*'([^']+)'", message)
    several = re.search(r"Ambiguous value for argument '([^=]+)=([^']*)'", message)
    if several is not None:
        name, value = several.groups()
        return ConfigError(
            name, f"{value} gives several values; write {name}=[{value}], or add -m to run each"
        )
    twice = re.match(
        r"Multiple values for ([\w/]+)\.|(\w+) appears more than once in the final def", message
    )
    if twice is not None:
        group = twice.group(1) or twice.group(2)
        return ConfigError(group, f"takes one choice; write {group}=... without the +")
    if key is None and isinstance(cause, OmegaConfBaseException):
        return from_omegaconf(cause)
    if key is None:
        return ConfigError("command line", " ".join(message.split("\n")[:2]))
    what, name = key.groups()
    if what == "delete":
        return ConfigError(name, "cannot be removed; give it a value instead")
    if what == "append":
        return ConfigError(name, f"already exists; write {name}=... without the +")
    return _unknown_key(name, overrides, conf)


def _from_hydra_itself(error: Exception) -> bool:
    """Whether it was raised in Hydra's or OmegaConf's code while they composed the settings."""
    innermost = list(traceback.walk_tb(error.__traceback__))[-1:]
    modules = [frame.f_globals.get("__name__", "") for frame, _ in innermost]
    return any(name.partition(".")[0] in ("hydra", "omegaconf") for name in modules)


def _refused(error: Exception, overrides: Sequence[str], conf: Path) -> Exception:
    """Return the ConfigError that names the first setting which alone gives this kind of error."""
    for override in overrides:
        try:
            _compose([override], conf)
        except Exception as again:
            if type(again) is type(error):
                name, _, value = override.lstrip("+~").partition("=")
                return ConfigError(name, f"does not take {value}; --help shows what it takes")
    return error


def _no_such_choice(
    error: MissingConfigException, overrides: Sequence[str], conf: Path
) -> ConfigError:
    group, _, choice = (error.missing_cfg_file or "").rpartition("/")
    if choice.startswith("submitit"):
        return ConfigError("launcher", "needs the extra slurm: pip install 'gptattn[slurm]'")
    if group == "hydra/launcher" and choice in ("joblib", "ray"):
        return ConfigError("launcher", f"needs its plugin: pip install hydra-{choice}-launcher")
    if not group:
        return ConfigError("--config-name", f"{choice!r} does not exist; train is the default")
    # Hydra gives no options for a name in a list.
    folders = [conf, *map(Path, re.findall(r"file://([^],]+)", " ".join(_search_path(overrides))))]
    files = [file.stem for folder in folders for file in (folder / group).glob("*.yaml")]
    return ConfigError(
        group, f"{choice!r} is unknown; {suggest(choice, error.options or {*files})}"
    )


def _unknown_key(key: str, overrides: Sequence[str], conf: Path) -> ConfigError:
    """Return the error for a setting that does not exist, with the nearest one that does."""
    chosen = [o for o in overrides if re.match(GROUPS, o)]
    keys = _known_keys([*_search_path(overrides), *chosen], conf)
    above = key.rpartition(".")[0]
    siblings = [name for name in keys if above and name.startswith(f"{above}.")]
    if siblings:
        return ConfigError(key, f"is not a setting; {suggest(key, siblings)}")
    if above in keys:
        return ConfigError(key, f"is not a setting; {above} has none")
    near = difflib.get_close_matches(key, keys, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}? " if near else ""
    return ConfigError(key, f"is not a setting; {hint}--help lists them all")


def _known_keys(choices: Sequence[str], conf: Path) -> list[str]:
    for chosen in (choices, []):
        with contextlib.suppress(Exception):  # what is wrong with another choice is another error
            plain = OmegaConf.to_container(_compose(chosen, conf))
            return list(dotted(plain))
    return []


def _compose(overrides: Sequence[str], conf: Path) -> DictConfig:
    with initialize_config_dir(version_base="1.3", config_dir=str(conf)):
        return compose("train", list(overrides))


def _search_path(overrides: Sequence[str]) -> list[str]:
    """Return the setting of Hydra that names the folders of the user's own in a command line."""
    given = [o for o in overrides if o.startswith("hydra.searchpath=")]
    line = " ".join(overrides)
    folders = re.findall(r"(?:^| )(?:--config-dir|-cd)[= ](\S+)", line)
    own = [f"hydra.searchpath=[{','.join(f'file://{Path(f).absolute()}' for f in folders)}]"]
    return given or own * bool(folders)
