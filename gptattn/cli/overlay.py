"""Checks which files Hydra may read and which objects a config may name, before any is created.

YAML folders (--config-dir) may come from others and are not trusted.
"""

import re
from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import hydra.conf
import yaml
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf

from gptattn.errors import ConfigError
from gptattn.machine.untrusted import LOADER, check_yaml, read_bytes
from gptattn.settings.targets import check_name, check_targets, named

FILE_BYTES = 200_000  # the largest file in conf/ has 4 kB
TABLES = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:null")  # a valid root; null: an empty file
PLUGINS = {
    "launcher": ("hydra_plugins", "hydra._internal.core_plugins"),
    "sweeper": ("hydra_plugins", "hydra._internal.core_plugins"),
}
HYDRA_CONF = Path(hydra.conf.__file__).parent / "hydra"
# Settings that let foreign code run: only the command line may give them, no file.
COMMAND_LINE_ONLY = ("allow_targets", "hydra.job.env_set")


_READ: dict[tuple[Path, str, str], ConfigResult] = {}


class CheckedFiles(FileConfigSource):
    """Hydra's reader of config files, with limits on their content and no way out of its folder."""

    def load_config(self, config_path: str) -> ConfigResult:
        _check_path(config_path)
        file = Path(self.path) / self._normalize_file_name(config_path)
        key = (file, self.provider, read_config_text(file))
        # A sweep composes hundreds of configs of the same files; parsing them took a third of that.
        if key not in _READ:
            try:
                _READ[key] = super().load_config(config_path)
            except (ValueError, yaml.YAMLError) as error:  # such as a Python tag or a repeated key
                raise _no_config(file, error) from None
        return deepcopy(_READ[key])  # Hydra takes the defaults list out of what it gets

    def is_group(self, config_path: str) -> bool:
        _check_path(config_path)
        return super().is_group(config_path)

    def is_config(self, config_path: str) -> bool:
        _check_path(config_path)
        return super().is_config(config_path)


# In a submitit job Hydra registers its readers again. It keeps a reader that has the same class
# name, and refuses any other.
CheckedFiles.__name__ = FileConfigSource.__name__


def register_checked_files() -> None:
    """Make Hydra read its files through CheckedFiles."""
    Plugins.instance()  # registers Hydra's own reader, which ours replaces
    SourcesRegistry.instance().types[FileConfigSource.scheme()] = CheckedFiles


def read_config_text(file: Path) -> str:
    """Return the text of a YAML file. Raises ConfigError if it exceeds a limit or is no mapping."""
    try:
        text = read_bytes(file, FILE_BYTES).decode("utf-8")
        _check_text(text)
    except OSError as error:
        raise ConfigError(str(file), f"cannot be read ({error.strerror})") from None
    except (ValueError, yaml.YAMLError) as error:
        raise _no_config(file, error) from None
    return text


@cache
def _check_text(text: str) -> None:
    """Raise ValueError or YAMLError for a text that exceeds a limit or is no mapping."""
    check_yaml(text)
    root = yaml.compose(text, Loader=LOADER)
    if root is not None and root.tag not in TABLES:
        raise ValueError("it holds no settings; write one name: value per line")


def _no_config(file: Path, error: Exception) -> ConfigError:
    return ConfigError(str(file), f"is not a config file: {' '.join(str(error).split())[:300]}")


def _check_path(path: str) -> None:
    """Raise ConfigError if `path`, a group and a choice as `group/choice`, leaves the folder."""
    if path.startswith("/") or "\\" in path or ".." in path.split("/") or "\0" in path:
        raise ConfigError(
            path.partition("/")[0][:80] or "config",
            f"{path[:200]!r} is not a choice: it points outside the folder; give a name in it",
        )


def check_composed(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Raise ConfigError if a composed config, or hydra's node in it, names what is not allowed."""
    plain: Any = OmegaConf.to_container(cfg, resolve=False)
    own = plain.pop("hydra", None) or {}
    for name in COMMAND_LINE_ONLY:
        if OmegaConf.select(cfg, name) and not any(
            re.match(rf"\+*{re.escape(name)}\b", override) for override in overrides
        ):
            raise ConfigError(name, "is set in a file; set it on the command line, or leave it out")
    allowed = plain.get("allow_targets")
    check_targets(plain, list(map(str, allowed)) if isinstance(allowed, list) else [])
    for path, target in named(own):
        field = ".".join(("hydra", *path, "_target_"))
        if len(path) != 1 or path[0] not in PLUGINS:
            raise ConfigError(field, "has no meaning here; leave it out")
        # Hydra's own plugins lie in a private module.
        check_name(field, target, PLUGINS[path[0]], private=True)
    for name in PLUGINS:
        if not isinstance(own.get(name), dict) or "_target_" not in own[name]:
            raise ConfigError(f"hydra.{name}", f"has no _target_; choose one with hydra/{name}=...")
    _check_sweeper(own["sweeper"])
    if own.get("callbacks"):
        raise ConfigError("hydra.callbacks", "are not supported; leave them out")
    for name in ("job_logging", "hydra_logging"):
        _check_logging(name, own.get(name))


def _check_sweeper(node: dict[str, Any]) -> None:
    if not isinstance(node.get("params"), dict | None):
        raise ConfigError("hydra.sweeper.params", "is not a table; give {name: values}, or null")
    variants = node.get("variants")
    if variants is not None and (
        not isinstance(variants, list)
        or not variants
        or not all(isinstance(one, str) and one.strip() for one in variants)
    ):
        raise ConfigError(
            "hydra.sweeper.variants", 'is not a list of overrides; give ["attn=mha",...], or null'
        )
    for name in ("tune", "uptrain"):
        if not isinstance(node.get(name), dict | None):
            raise ConfigError(
                f"hydra.sweeper.{name}", "is not a table; give {name: value}, or null"
            )
    most = node.get("max_batch_size")
    if most is not None and (type(most) is not int or most < 1):
        raise ConfigError(
            "hydra.sweeper.max_batch_size",
            f"{most!r} is not a number of runs; give 1 or more, or null",
        )


def _check_logging(group: str, node: Any) -> None:
    """Accept only Hydra's own logging files: Python's logging creates any object a config names."""
    own = _hydra_files(group)
    if node not in own.values():
        raise ConfigError(
            f"hydra.{group}",
            f"differs from Hydra's own; use one of those, hydra/{group}={' or '.join(own)}",
        )


@cache
def _hydra_files(group: str) -> dict[str, Any]:
    """Return the contents of Hydra's own files of this group, by name."""
    files = sorted((HYDRA_CONF / group).glob("*.yaml"))
    return {file.stem: yaml.load(file.read_text(), Loader=LOADER) for file in files}
