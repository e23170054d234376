"""The settings of a resumed run: its recorded ones, with the few changes that are allowed."""

from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from gptattn.errors import ConfigError
from gptattn.settings.config import TrainConfig, check
from gptattn.settings.identity import MAY_CHANGE, meaning
from gptattn.settings.values import dotted, suggest, typed

BUDGETS = ("steps", "tokens", "seconds", "flops")
# Said of the command, not of the run.
COMMAND = ("resume", "run_dir", "allow_targets")


def resumed_settings(
    recorded: TrainConfig,
    overrides: Sequence[str],
    cfg: DictConfig,
    choices: Any,
    free: Collection[str] = (),
) -> TrainConfig:
    """Return the recorded settings with the overrides that were typed applied.

    `cfg` is the config that Hydra has composed with them, which has their values, and `choices`
    what it has chosen in each group. The settings in `free` may change too. Raises ConfigError,
    naming the field, for a change that is not allowed when a run resumes.
    """
    parser = OverridesParser.create()
    settings, node = recorded, asdict(recorded)
    given = []
    for override in parser.parse_overrides(list(overrides)):
        key = override.key_or_group
        if key in COMMAND:
            continue
        if override.is_add() or override.is_delete() or override.package:
            raise ConfigError(key, "a resumed run accepts only name=value")
        if key in recorded.choices:
            _check_equal(key, str(choices[key]), recorded.choices[key])
        elif key == "part":
            _check_equal(key, list(cfg.part), list(recorded.part))
        elif key == "trainer":
            node["trainer"] |= {n: cfg.trainer[n] for n in ("devices", "num_nodes")}
            _check_equal(key, cfg.trainer.accelerator, recorded.trainer.accelerator)
        elif key == "logger":
            chosen: Any = OmegaConf.to_container(cfg.logger, resolve=True)
            node["logger"] = {name: recorded.logger.get(name, chosen[name]) for name in chosen}
        elif key.partition(".")[0].partition("/")[0] in ("hydra", "experiment", "launcher"):
            raise ConfigError(key, "cannot change when a run resumes; leave it out")
        else:
            value = OmegaConf.select(cfg, key)
            value = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
            _set(node, key, value, recorded, free)
            given += [key] if value is not None else []
    budgets = [key.removeprefix("budget.") for key in given]
    budgets = [unit for unit in budgets if unit in BUDGETS]
    if len(budgets) == 1:  # a new budget in one unit replaces the old one in another
        node["budget"] |= {unit: None for unit in BUDGETS if unit != budgets[0]}
    settings = replace(typed(TrainConfig, node), allow_targets=recorded.allow_targets)
    check(settings)
    return settings


def _set(
    node: dict[str, Any], key: str, value: Any, recorded: TrainConfig, free: Collection[str]
) -> None:
    """Set the dotted name in the nested settings. Raises ConfigError if it may not change."""
    known = list(dotted(asdict(recorded)))
    if key not in known:
        near = [name for name in known if name.partition(".")[0] == key.partition(".")[0]]
        near = near if len(near) > 1 else [name for name in known if "." not in name]
        raise ConfigError(key, f"is not a setting of this run; {suggest(key, near)}")
    *path, name = key.split(".")
    parent: Any = node
    for part in path:
        parent = parent[part]
    if not meaning(key).resumes and key not in free:
        _check_equal(key, value, parent[name])
    both = isinstance(value, dict) and isinstance(parent[name], dict)
    parent[name] = {**parent[name], **value} if both else value


def _check_equal(key: str, value: Any, recorded: Any) -> None:
    if value != recorded:
        raise ConfigError(
            key,
            f"is {recorded} in this run and cannot change to {value}; leave it out, or start a new "
            f"run ({MAY_CHANGE} may change)",
        )
