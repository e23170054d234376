"""The settings of a resumed run: its recorded ones, with the few changes that are allowed."""

from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from gptattn.cli.choices import CONF, choices_in
from gptattn.cli.overlay import read_config_text
from gptattn.errors import ConfigError
from gptattn.machine.untrusted import LOADER
from gptattn.settings.config import Spec, TrainConfig, check
from gptattn.settings.identity import MAY_CHANGE, meaning
from gptattn.settings.values import check_choice, dotted, suggest, typed

BUDGETS = ("steps", "tokens", "seconds", "flops")


def resume_argument(overrides: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the folder of `resume=FOLDER`, or None, and the other overrides.

    Raises ConfigError if the folder is empty or given twice.
    """
    folders = [o.partition("=")[2] for o in overrides if o.startswith("resume=")]
    others = [o for o in overrides if not o.startswith("resume=")]
    if len(folders) > 1 or "" in folders:
        raise ConfigError("resume", "takes exactly one run folder; give resume=FOLDER")
    if not folders:
        return None, others
    quoted = folders[0][:1] in ("'", '"')
    return str(_parsed(f"resume={folders[0]}").value()) if quoted else folders[0], others


def allowed_packages(overrides: Sequence[str]) -> list[str]:
    """Return the packages that the override `allow_targets=[...]` lists.

    Those in the run's record do not count. Raises ConfigError if it is no list of names.
    """
    packages: Any = []
    for override in overrides:
        if override.startswith("allow_targets="):
            packages = _parsed(override).value()
    if not isinstance(packages, list) or not all(isinstance(name, str) for name in packages):
        raise ConfigError(
            "allow_targets", "is not a list of packages; give allow_targets=[PACKAGE]"
        )
    return [str(name) for name in packages]


def resumed(
    recorded: TrainConfig,
    overrides: Sequence[str],
    threads: int | None,
    *,
    free: Collection[str] = (),
) -> TrainConfig:
    """Return the recorded settings with the overrides applied.

    `threads` is the number of CPU threads that the run used, None if unknown. The settings in
    `free` may change as well. Raises ConfigError, which names the field, for a change that is not
    allowed when a run resumes.
    """
    settings = recorded
    given = [_parsed(override) for override in overrides]
    for override in given:
        settings = _applied(settings, override, recorded, threads, free)
    kinds = [o.key_or_group.removeprefix("budget.") for o in given if o.value() is not None]
    kinds = [kind for kind in kinds if kind in BUDGETS]
    for other in BUDGETS:
        # A new budget in one unit replaces the old one in another.
        if len(kinds) == 1 and other != kinds[0]:
            settings = _changed(settings, f"budget.{other}", None)
    check(settings)
    return settings


def _parsed(override: str) -> Override:
    try:
        return OverridesParser.create().parse_override(override)
    except HydraException:
        raise ConfigError(
            override, "cannot be read; write name=value, or 'name=\"value\"' for special characters"
        ) from None


def _applied(
    settings: TrainConfig,
    override: Override,
    recorded: TrainConfig,
    threads: int | None,
    free: Collection[str],
) -> TrainConfig:
    key, known = override.key_or_group, list(dotted(asdict(recorded)))
    added = override.is_add() or override.is_force_add()
    if added or override.is_delete() or override.is_sweep_override() or override.package:
        raise ConfigError(key, "a resumed run accepts only name=value")
    value: Any = override.value()
    if key in recorded.choices:
        _compare(key, value, recorded.choices[key])
    elif key == "part" and isinstance(value, str | list):
        _compare("part", [value] if isinstance(value, str) else value, list(recorded.part))
    elif key == "logger" and isinstance(value, str | list):
        return replace(settings, logger=_loggers(value, settings))
    elif key == "trainer" and value == "ddp":
        settings = _changed(settings, "trainer.devices", "auto")
        return _changed(settings, "trainer.num_nodes", "auto")
    elif key == "trainer" and isinstance(value, str):
        _compare("trainer", value, recorded.trainer.accelerator)
    elif key.partition(".")[0].partition("/")[0] in ("hydra", "experiment", "launcher"):
        raise ConfigError(key, "cannot change when a run resumes; leave it out")
    elif key not in known:
        near = known if key.partition(".")[0] in known else [n for n in known if "." not in n]
        raise ConfigError(key, f"is not a setting; {suggest(key, near)}")
    elif key != "trainer.threads" or value != threads:
        changed = _changed(settings, key, value)
        if not meaning(key).resumes and key not in free:
            before = _value(settings, key)
            before = threads or before if key == "trainer.threads" else before
            _compare(key, _value(changed, key), before)
        return changed
    return settings


def _loggers(names: Any, settings: TrainConfig) -> dict[str, Spec]:
    """Return the settings of these loggers: the run's own, and for a new one those of its file."""
    names = [names] if isinstance(names, str) else names
    for name in names:
        check_choice("logger", str(name), {*choices_in("logger"), *settings.logger})
    return {name: settings.logger.get(name) or _of_file(name) for name in names}


def _of_file(name: str) -> Spec:
    return yaml.load(read_config_text(CONF / "logger" / f"{name}.yaml"), Loader=LOADER)


def _changed(settings: TrainConfig, key: str, value: Any) -> TrainConfig:
    """Return the settings with `value` at the dotted name; a dict is merged into the old one."""
    node = asdict(settings)
    *path, name = key.split(".")
    parent = node
    for part in path:
        parent = parent[part]
    old = parent[name]
    both = isinstance(value, dict) and isinstance(old, dict)
    parent[name] = {**old, **value} if both else value
    return typed(TrainConfig, node)


def _value(settings: TrainConfig, key: str) -> Any:
    node: Any = asdict(settings)
    for part in key.split("."):
        node = node[part]
    return node


def _compare(key: str, value: Any, recorded: Any) -> None:
    if value != recorded:
        raise ConfigError(
            key,
            f"is {recorded} in this run and cannot change to {value}; leave it out, or start a new "
            f"run ({MAY_CHANGE} may change)",
        )
