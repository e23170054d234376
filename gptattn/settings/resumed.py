"""The settings of a resumed run: its recorded ones, with the few changes that are allowed."""

import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from gptattn.errors import ConfigError
from gptattn.settings.config import TrainConfig
from gptattn.settings.identity import MAY_CHANGE, flat, meaning
from gptattn.settings.values import suggest, typed

BUDGETS = ("steps", "tokens", "seconds", "flops")
# Said of the command, not of the run.
COMMAND = ("resume", "run_dir", "allow_targets")


def resumed_settings(
    recorded: TrainConfig,
    overrides: Sequence[str],
    cfg: DictConfig,
    choices: Any,
) -> TrainConfig:
    """Return the recorded settings with the overrides that were typed applied.

    `cfg` is the config that Hydra has composed with them, which has their values, and `choices`
    what it has chosen in each group. Raises ConfigError, naming the field, for a change that is not
    allowed when a run resumes.
    """
    node = asdict(recorded)
    units = []
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        key, given = override.key_or_group, override.value()
        group = re.split("[./]", key)[0]
        chooses = not isinstance(given, dict)  # a file of the group; optim={lr:1} sets values
        if key in COMMAND:
            continue
        if override.is_add() or override.is_delete() or override.package:
            raise ConfigError(key, "a resumed run accepts only name=value")
        if chooses and key in recorded.choices:
            _check_equal(key, str(choices[key]), recorded.choices[key])
        elif chooses and key == "part":
            _check_equal(key, list(cfg.part), list(recorded.part))
        elif chooses and key == "trainer":
            node["trainer"] |= {n: cfg.trainer[n] for n in ("devices", "num_nodes")}
            _check_equal(key, cfg.trainer.accelerator, recorded.trainer.accelerator)
        elif chooses and key == "logger":
            chosen: Any = OmegaConf.to_container(cfg.logger, resolve=True)
            node["logger"] = {name: recorded.logger.get(name, chosen[name]) for name in chosen}
        elif group in ("hydra", "experiment", "launcher"):
            raise ConfigError(key, "cannot change when a run resumes; leave it out")
        else:
            *path, name = key.split(".")
            parent: Any = node
            for part in path:
                parent = parent.get(part) if isinstance(parent, dict) else None
            if not isinstance(parent, dict) or name not in parent:
                near = suggest(key, [one for one in flat(node) if one.startswith(f"{group}.")])
                raise ConfigError(key, f"is not a setting of this run; {near}")
            value, old = OmegaConf.select(cfg, key), parent[name]
            value = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
            changes = [(key, value, old)]
            if isinstance(given, dict):
                old = old or {}
                value = {**old, **given}
                changes = [(f"{key}.{one}", given[one], old.get(one)) for one in given]
            for field, after, before in changes:
                if not meaning(field).resumes:
                    _check_equal(field, after, before)
            parent[name] = value
            if group == "budget" and name in BUDGETS and value is not None:
                units.append(name)
    if len(units) == 1:  # a new budget in one unit replaces the old one in another
        node["budget"] |= {unit: None for unit in BUDGETS if unit != units[0]}
    return replace(typed(TrainConfig, node), allow_targets=recorded.allow_targets)


def _check_equal(key: str, value: Any, recorded: Any) -> None:
    if value != recorded:
        raise ConfigError(
            key,
            f"is {recorded} in this run and cannot change to {value}; leave it out, or start a new "
            f"run ({MAY_CHANGE} may change)",
        )
