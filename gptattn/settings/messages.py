"""Hydra's errors about a command line, in one line that names the field and what would be right."""

import re
import traceback
from collections.abc import Sequence
from pathlib import Path

import yaml
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from gptattn.errors import ConfigError, UserError
from gptattn.settings.values import REMOVED, explain_omegaconf_error, suggest

# Hydra's message -> ours about the setting {0} with the value {1}.
SAYINGS = {
    r"Could not delete '([^']+)'": REMOVED,
    r"Could not append.* already at '([^']+)'": "already exists; write {0}=... without the +",
    r"Ambiguous value for argument '([^=]+)=([^']*)'": (
        "{1} gives several values; add -m to run each, or write {0}=[{1}] for a list"
    ),
    r"Multiple values for ([\w/]+)\.": "takes one choice; write {0}=... without the +",
    r"([\w/]+) appears more than once": "takes one choice; write {0}=... without the +",
}


def explain_hydra_error(error: Exception, overrides: Sequence[str], conf: Path) -> Exception:
    """Return the UserError for Hydra's or OmegaConf's error; any other error as it is.

    `overrides` are the command line's, `conf` the folder of the config files.
    """
    if isinstance(error, UserError):
        return error
    if isinstance(error, OmegaConfBaseException):
        return explain_omegaconf_error(error)
    if isinstance(error, MissingConfigException):
        group, _, choice = (error.missing_cfg_file or "").rpartition("/")
        if choice.startswith("submitit"):
            return ConfigError("launcher", "needs the extra slurm: pip install 'gptattn[slurm]'")
        if (group, choice) == ("hydra/launcher", "ray"):
            return ConfigError("launcher", "needs its plugin: pip install hydra-ray-launcher")
        if not group:
            return ConfigError("--config-name", f"{choice!r} does not exist; train is the default")
        # Hydra gives no options for a name in a list, but it names the folders where it looked.
        folders = [Path(folder, group) for folder in re.findall(r"path=file://(\S+)", str(error))]
        files = {file.stem for folder in folders for file in folder.glob("*.yaml")}
        known = suggest(choice, error.options or files)
        return ConfigError(group, f"{choice!r} is unknown; {known}")
    if isinstance(error, OverrideParseException):
        how = "cannot be read; write name=value, or 'name=\"value\"' for special characters"
        return ConfigError(error.override.partition("=")[0], how)
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return ConfigError(f"{mark.name}:{mark.line + 1}", f"{error.problem}; correct the file")
    message, cause = str(error), error.__cause__
    if isinstance(error, HydraException):
        for pattern, said in SAYINGS.items():
            if found := re.search(pattern, message):
                return ConfigError(found.group(1), said.format(*found.groups()))
        if isinstance(cause, OmegaConfBaseException):
            return explain_omegaconf_error(cause)
        return ConfigError("command line", " ".join(message.split("\n")[:2]))
    # A choice must be a string; Hydra's error about anything else does not name the group.
    for override in overrides:
        group, _, choice = override.partition("=")
        if (conf / group).is_dir() and isinstance(error, ValueError | TypeError):
            found = yaml.safe_load(choice)
            if not all(isinstance(one, str) for one in (found if type(found) is list else [found])):
                return ConfigError(group, f"does not take {choice}; --help shows what it takes")
    *_, (raised_in, _) = traceback.walk_tb(error.__traceback__)
    if raised_in.f_globals.get("__name__", "").startswith("hydra."):  # of its flags
        return ConfigError("command line", message.partition("\n")[0])
    return error
