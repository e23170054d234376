"""Hydra's errors about a command line, in one line that names the field and what would be right."""

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
        return _no_such_choice(error, conf)
    if isinstance(error, OverrideParseException):
        how = "cannot be read; write name=value, or 'name=\"value\"' for special characters"
        return ConfigError(error.override, how)
    if not isinstance(error, HydraException):
        return error
    message, cause = str(error), error.__cause__
    key = re.search(r"Could not (override|delete|append)[^']*'([^']+)'", message)
    several = re.search(r"Ambiguous value for argument '([^=]+)=([^']*)'", message)
    if several is not None:
        name, value = several.groups()
        return ConfigError(
            name, f"{value} gives several values; write {name}=[{value}], or add -m to run each"
        )
    if (twice := re.match(r"Multiple values for ([\w/]+)\.", message)) is not None:
        group = twice.group(1)
        return ConfigError(group, f"takes one choice; write {group}=... without the +")
    if key is None and isinstance(cause, OmegaConfBaseException):
        return from_omegaconf(cause)
    if key is None:
        return ConfigError("command line", message.splitlines()[0])
    what, name = key.groups()
    if what == "delete":
        return ConfigError(name, "cannot be removed; give it a value instead")
    if what == "append":
        return ConfigError(name, f"already exists; write {name}=... without the +")
    return _unknown_key(name, overrides, conf)


def _no_such_choice(error: MissingConfigException, conf: Path) -> ConfigError:
    group, _, choice = (error.missing_cfg_file or "").rpartition("/")
    if choice.startswith("submitit"):
        return ConfigError("launcher", "needs the extra slurm: pip install 'gptattn[slurm]'")
    if not group:
        return ConfigError("--config-name", f"{choice!r} does not exist; train is the default")
    # Hydra gives no options for a name in a list.
    options = error.options or [file.stem for file in (conf / group).glob("*.yaml")]
    return ConfigError(group, f"{choice!r} is unknown; {suggest(choice, options)}")


def _unknown_key(key: str, overrides: Sequence[str], conf: Path) -> ConfigError:
    """Return the error for a setting that does not exist, with the nearest one that does."""
    keys = _known_keys([o for o in overrides if re.match(GROUPS, o)], conf)
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
    for chosen in (choices, []):  # those of a folder of the user's own are not found here
        try:
            with initialize_config_dir(version_base="1.3", config_dir=str(conf)):
                cfg: Any = compose("train", list(chosen))
            plain = OmegaConf.to_container(cfg) if isinstance(cfg, DictConfig) else {}
            return list(dotted(plain))
        except HydraException:
            continue
    return []
