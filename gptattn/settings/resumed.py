"""The settings of a resumed run: those recorded, with the few changes that are allowed."""

from collections.abc import Sequence
from dataclasses import asdict, replace

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from gptattn.errors import ConfigError
from gptattn.settings.config import UNITS, TrainConfig
from gptattn.settings.identity import RESUMES, meaning
from gptattn.settings.values import build_dataclass

# Settings of the command, not of the run.
COMMAND = ("resume", "run_dir", "allow_targets")
UNKNOWN = object()  # equals no value


def resume_settings(
    recorded: TrainConfig, overrides: Sequence[str], cfg: DictConfig
) -> TrainConfig:
    """Return the recorded settings with the overrides of the command line applied.

    `cfg` is the config that Hydra composed with them, which has their values. Raises ConfigError,
    naming the field, for a change that a resumed run does not allow.
    """
    node = OmegaConf.create(asdict(recorded))
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        key = override.key_or_group
        if key in COMMAND:
            continue
        if override.is_add() or override.is_delete() or isinstance(override.value(), dict):
            raise ConfigError(key, "a resumed run accepts only name=value")
        if meaning(key) not in RESUMES:
            # The command that started the run, with resume= added, names nothing new.
            given = override.input_line in recorded.overrides
            value = OmegaConf.select(cfg, key)
            if not given and OmegaConf.select(node, key, default=UNKNOWN) != value:
                raise ConfigError(
                    key, "is fixed once a run has begun; leave it out, or start a new run"
                )
            continue
        OmegaConf.update(node, key, OmegaConf.select(cfg, key), merge=False)
    budget = {unit: cfg.budget[unit] for unit in UNITS}
    if any(value is not None for value in budget.values()):
        node.budget.update(budget)  # in one unit, it replaces the recorded one in another
    return replace(build_dataclass(TrainConfig, node), allow_targets=recorded.allow_targets)
