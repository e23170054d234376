"""Errors about a command line, including Hydra's, in one line that quotes what was typed."""

import re
import traceback
from collections.abc import Sequence
from pathlib import Path

import yaml
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from gptattn.errors import ConfigError, UserError
from gptattn.settings.comments import list_settings
from gptattn.settings.construct import SETTING_OF
from gptattn.settings.values import describe_unknown, suggest

REMOVED = "cannot be removed; give it a value instead"
# Hydra's message -> ours about the setting {0} with the value {1}.
HYDRA_ERRORS = {
    r"Could not delete '([^']+)'": REMOVED,
    r"Could not append.* already at '([^']+)'": "already exists; write {0}=... without the +",
    r"Ambiguous value for argument '(pattern|part)=([^']*)'": "write {0}=[{1}], or -m to run each",
    r"Ambiguous value for argument '([^=]+)=([^']*)'": "{1} has several values; add -m to run each",
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
        return explain_omegaconf_error(error, conf)
    if isinstance(error, MissingConfigException):
        file = error.missing_cfg_file or ""
        group, choice = re.findall(r"^(?:((?:hydra/)?\w+)/)?(.*)", file)[0]
        if group == "data" and re.search("[./]", choice):
            how = f"data=text data.path={choice}, or data=hf data.name=OWNER/NAME"
            return ConfigError(group, f"{choice!r} is not a source of data; write {how}")
        if choice.startswith("submitit"):
            return ConfigError("launcher", "needs the extra slurm: pip install 'gptattn[slurm]'")
        if (group, choice) == ("hydra/launcher", "ray"):
            return ConfigError("launcher", "needs its plugin: pip install hydra-ray-launcher")
        if not group:
            return ConfigError("--config-name", f"{choice!r} does not exist; train is the default")
        # For a name in a list, Hydra gives no options but the folders where it looked.
        folders = [Path(folder, group) for folder in re.findall(r"path=file://(\S+)", str(error))]
        files = {file.stem for folder in folders for file in folder.glob("*.yaml")}
        hint = suggest(choice, error.options or files)
        return ConfigError(group, f"{choice!r} is unknown; {hint}")
    if isinstance(error, OverrideParseException):
        how = "cannot be read; write name=value, or 'name=\"value\"' for special characters"
        return ConfigError(error.override.partition("=")[0], how)
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return ConfigError(f"{mark.name}:{mark.line + 1}", f"{error.problem}; correct the file")
    message, cause = str(error), error.__cause__
    if isinstance(error, HydraException):
        for pattern, ours in HYDRA_ERRORS.items():
            if match := re.search(pattern, message):
                return ConfigError(match.group(1), ours.format(*match.groups()))
        if isinstance(cause, OmegaConfBaseException):
            return explain_omegaconf_error(cause, conf)
        return ConfigError("command line", " ".join(message.split("\n")[:2]))
    in_list = re.match(r"(?:Index|invalid literal for int.*:) '(\w+)'", message)
    # A choice must be a string; Hydra's error about anything else does not name the group.
    for override in overrides:
        group, _, choice = override.lstrip("+").partition("=")
        if in_list and f".{in_list[1]}." in f"{group}.":
            what = "attn.NAME, or layers.LAYER.attn.KIND.NAME" if "pattern." in group else "[a,b]"
            return ConfigError(group, f"sets a part of a list; use {what}")
        if (conf / group).is_dir() and isinstance(error, ValueError | TypeError):
            value = yaml.safe_load(choice)
            if not all(isinstance(one, str) for one in (value if type(value) is list else [value])):
                return ConfigError(group, f"does not take {choice}; --help lists its choices")
    *_, (raised_in, _) = traceback.walk_tb(error.__traceback__)
    if raised_in.f_globals.get("__name__", "").startswith("hydra."):  # about its flags
        return ConfigError("command line", message.partition("\n")[0])
    return error


def explain_omegaconf_error(error: OmegaConfBaseException, conf: Path) -> ConfigError:
    """Return the ConfigError for OmegaConf's error about a setting."""
    field = str(error.full_key or error.key or "config")
    if isinstance(error, ConfigKeyError | ConfigAttributeError):
        return ConfigError(field, describe_unknown(field, list_settings(conf)))
    return ConfigError(field, (error.msg or str(error)).splitlines()[0])


def name_typed(error: UserError, overrides: Sequence[str]) -> UserError:
    """Return the error with a typed setting as its field, if its own field was not typed.

    The message must name that setting, or the argument that it fills, with the typed value:
    `num_heads=4 must divide d_out=65` does so for `model.d_model=65`.
    """
    pairs = [override.lstrip("+").partition("=") for override in overrides]
    typed = {name: value for name, _, value in pairs}
    # pattern.local.window is typed as attn.window or layers.local.attn.gqa.window; parts likewise.
    field = re.sub(r"^pattern\.\w+\.", "attn.", error.field)
    of_layer = re.compile(r"layers\.\w+\." + re.escape(field).replace(r"\.", r"\.(\w+\.)?", 1))
    field = next(filter(of_layer.fullmatch, typed), field)
    if field in typed:
        return error if field == error.field else type(error)(field, error.message)
    quoted = []
    for word, value in re.findall(r"\b([a-z]\w*(?:\.\w+)*)(?:=([\w.-]*\w))?", error.message):
        name = SETTING_OF.get(word, word if word in typed or "." in word else f"attn.{word}")
        if typed.get(name) == value or ("." in word and not value and word in typed):
            quoted.append(name)
    if not quoted or quoted[0].startswith(f"{field}."):
        return error
    message = f"{typed[quoted[0]]} does not fit {field}: {error.message}"
    divides = re.match(r"(\w+)=(\d+) must divide (\w+)=(\d+)", error.message)
    if divides is not None and quoted[0] == SETTING_OF.get(divides[3]):
        divisor, number = int(divides[2]), int(divides[4])
        below = number // divisor * divisor
        near = [str(one) for one in (below, below + divisor) if one]
        message = f"{number} is not a multiple of {field}={divisor}; give {' or '.join(near)}"
    return type(error)(quoted[0], message)
