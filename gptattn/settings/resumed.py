"""The settings of a resumed run: those recorded, with the few changes that are allowed."""

import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from gptattn.errors import ConfigError
from gptattn.settings.config import BudgetConfig, TrainConfig
from gptattn.settings.identity import RESUMES, flat, meaning
from gptattn.settings.values import build_dataclass, suggest

# Settings of the command, not of the run.
COMMAND = ("resume", "run_dir", "allow_targets")


def resume_settings(
    recorded: TrainConfig,
    overrides: Sequence[str],
    cfg: DictConfig,
    choices: Any,
) -> TrainConfig:
    """Return the recorded settings with the overrides of the command line applied.

    `cfg` is the config that Hydra composed with them, which has their values, and `choices` what it
    chose in each group. Raises ConfigError, naming the field, for a change that a resumed run does
    not allow.
    """
    node = OmegaConf.create(asdict(recorded))
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        key, given = override.key_or_group, override.value()
        group = re.split("[./]", key)[0]
        if key in COMMAND:
            continue
        if override.is_add() or override.is_delete() or override.package or type(given) is dict:
            raise ConfigError(key, "a resumed run accepts only name=value")
        if group in ("hydra", "experiment", "launcher"):
            raise ConfigError(key, "cannot change when a run resumes; leave it out")
        if key in recorded.choices:
            _check_equal(key, str(choices[key]), recorded.choices[key])
        elif key == "part":
            _check_equal(key, list(cfg.part), list(recorded.part))
        elif key == "trainer":
            _check_equal(key, cfg.trainer.accelerator, recorded.trainer.accelerator)
            node.trainer.update({name: cfg.trainer[name] for name in ("devices", "num_nodes")})
        elif key == "logger":
            node.logger = {name: recorded.logger.get(name, cfg.logger[name]) for name in cfg.logger}
        else:
            above, _, last = key.rpartition(".")
            parent = OmegaConf.select(node, above) if above else node
            if not isinstance(parent, DictConfig) or (last not in parent and group != "logger"):
                there = flat(asdict(recorded))
                near = suggest(key, [one for one in there if one.startswith(f"{group}.")])
                raise ConfigError(key, f"is not a setting of this run; {near}")
            value = OmegaConf.select(cfg, key)
            if meaning(key) not in RESUMES:
                _check_equal(key, value, parent[last])
            parent[last] = value
    if (budget := build_dataclass(BudgetConfig, cfg.budget)).given():
        node.budget = asdict(budget)  # one in another unit replaces the recorded one
    return replace(build_dataclass(TrainConfig, node), allow_targets=recorded.allow_targets)


def _check_equal(key: str, value: Any, recorded: Any) -> None:
    if value != recorded:
        raise ConfigError(
            key,
            f"is {recorded} in this run and cannot change to {value}; leave it out, or start a new "
            "run",
        )
