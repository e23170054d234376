"""Turns Hydra's composed config, and the files it names, into a new or resumed run's settings."""

import contextlib
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gptattn.errors import ConfigError
from gptattn.machine.disk import expand_path
from gptattn.settings.config import CONF, UNITS, Settings, TrainConfig, check, variant_name
from gptattn.settings.construct import check_targets
from gptattn.settings.identity import RESUMES, TYPED_PATHS, effect_of
from gptattn.settings.layers import read_files, read_layers
from gptattn.settings.messages import REMOVED, explain_hydra_error, explain_omegaconf_error
from gptattn.settings.own_code import use_folders
from gptattn.settings.values import build_dataclass, check_type

# Groups in which constructors, or `layers.py`, check the keys.
OPEN = ("attn", "layers", "part", "position", "data", "tokenizer", "logger", "trainer.callbacks")
# Settings of the command, not of the run.
COMMAND = ("resume", "run_dir", "allow_targets")
# Left out of the recorded overrides, which name the rows of a report.
OF_ONE_RUN = ("seed", "run_dir", "sweep.beside_others")


# Hydra refuses names that the files in conf/ lack, except in these groups.
_groups = OmegaConf.create()
for _name in OPEN:
    OmegaConf.update(_groups, _name, {})
    OmegaConf.set_struct(OmegaConf.select(_groups, _name), False)
ConfigStore.instance().store("open_groups", _groups)


def settings(overrides: Sequence[str] = ()) -> TrainConfig:
    """Return the checked settings of a run from overrides, such as `["attn=gqa", "seed=2"]`.

    Raises ConfigError, which names the field.
    """
    try:
        with contextlib.ExitStack() as stack:
            if not GlobalHydra.instance().is_initialized():  # a job of Hydra's has done it
                stack.enter_context(initialize_config_dir(str(CONF), version_base="1.3"))
            cfg = compose("train", list(overrides), return_hydra_config=True)
            run_settings = from_hydra(cfg, cfg.hydra)
    except Exception as error:
        raise explain_hydra_error(error, overrides, CONF) from error
    check(run_settings)
    return run_settings


def from_hydra(cfg: DictConfig, hydra: DictConfig) -> TrainConfig:
    """Return the unchecked settings of a composed job; `hydra` is the job's hydra node.

    Raises ConfigError for a name in `pattern` or `match_to` that has no file.
    """
    typed: Any = OmegaConf.to_container(hydra.overrides.task)
    keys = [re.split("[=@]", override.lstrip("+~"), maxsplit=1)[0] for override in typed]
    for key, override in zip(keys, typed, strict=True):
        if override.startswith("~"):
            raise ConfigError(key, REMOVED)
    without_hydra = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
    try:
        _make_absolute(without_hydra)
        node: Any = OmegaConf.to_container(without_hydra, resolve=True)
    except OmegaConfBaseException as error:
        raise explain_omegaconf_error(error, CONF) from error
    for name in ("run_dir", "resume"):  # the command's, not recorded
        check_type(name, node.pop(name), str | float | None)
    command = build_dataclass(Settings, node)
    values = {**vars(command)}
    groups = ("attn", "block", "model", "position", "data", "tokenizer", "optim")
    choices = {group: hydra.runtime.choices.get(group) for group in groups}
    for group, choice in choices.items():
        if not isinstance(choice, str):
            raise ConfigError(group, "takes one choice; give one name, or add -m to run each")

    folders = [Path(one.path) for one in hydra.runtime.config_sources if one.schema == "file"]
    user_folders = [folder for folder in folders if folder != CONF]
    use_folders(user_folders)
    for folder in user_folders:
        for group, choice in choices.items():
            file = Path(group, f"{choice}.yaml")
            if (folder / file).exists() and (CONF / file).exists():
                raise ConfigError(group, f"{folder / file} has a built-in file's name; rename it")

    if command.match != "none":
        files = read_files("match_to", {"attn": [command.match_to]}, cfg, folders)
        values["match_attn"] = files["attn"]
    if command.pattern is not None:
        recipe = hydra.runtime.choices.get("recipe")
        changed = {"pattern", "layers"} & {*keys}
        whole = None if changed or not isinstance(recipe, str) else recipe
        layers = read_layers(command, keys, cfg, folders, command.allow_targets, whole)
        choices["attn"] = variant_name(layers if len(layers) == 1 else command.pattern, [])
        if not command.layers and len(layers) == 1:  # the same run, and name, as with attn=
            values |= {**layers[choices["attn"]], "pattern": None}
        else:
            values |= {"attn": {}, "layers": layers}
            # Settings typed for parts and positions of layers must not choose any for the model.
            layer_parts = [layer.get("part", {}) for layer in layers.values()]
            values["part"] = {
                name: spec
                for name, spec in command.part.items()
                if "_target_" in spec or not any(name in parts for parts in layer_parts)
            }
            if "_target_" not in command.position and any("position" in o for o in layers.values()):
                values["position"] = {}
        if isinstance(recipe, str):
            choices["attn"] = whole or f"{recipe}:{','.join(command.pattern)}"
    for file in [f for folder in folders if command.part for f in folder.glob("part/*.yaml")]:
        package = re.match(r"# @package (\S+)", file.read_text(encoding="utf-8"))
        name = f"part.{file.stem}"
        if package is not None and package[1] != name:
            line = f'its first line must be "# @package {name}"'
            raise ConfigError("part", f"{file.name} sets {package[1]}; {line}")
    named = values | {"trainer.callbacks": command.trainer.callbacks}
    code_folders = check_targets(named, command.allow_targets)
    kept = [o for o, key in zip(typed, keys, strict=True) if key not in OF_ONE_RUN]
    kept = [o for o in kept if not o.startswith(("++compile=", "++sweep."))]  # set by a sweep
    values |= {"code_folders": sorted(map(str, code_folders)), "overrides": kept}
    return TrainConfig(**values, choices=choices)


def _make_absolute(settings: DictConfig) -> None:
    """Make the paths in the settings absolute, so that the working directory does not matter."""
    for key in TYPED_PATHS:
        path = OmegaConf.select(settings, key)
        if isinstance(path, str) and not path.startswith("hf:"):
            OmegaConf.update(settings, key, str(expand_path(path, key).absolute()))


def resume_settings(
    recorded: TrainConfig, overrides: Sequence[str], cfg: DictConfig
) -> TrainConfig:
    """Return the recorded settings with the command line's overrides applied.

    `cfg`, which Hydra composed with the overrides, has their values. Raises ConfigError, naming the
    field, for a change that a resumed run does not allow.
    """
    node = OmegaConf.create(asdict(recorded))
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        key = override.key_or_group
        if key in COMMAND:
            continue
        if override.is_add() or override.is_delete() or isinstance(override.value(), dict):
            raise ConfigError(key, "a resumed run accepts only name=value")
        value = OmegaConf.select(cfg, key)
        if effect_of(key) in RESUMES:
            OmegaConf.update(node, key, value, merge=False)
            continue
        # Adding resume= to the command that started the run changes nothing.
        repeated = override.input_line in recorded.overrides
        if not repeated and OmegaConf.select(node, key) != value:
            raise ConfigError(
                key, "is fixed once a run has begun; leave it out, or start a new run"
            )
    budget = {unit: cfg.budget[unit] for unit in UNITS}
    if any(value is not None for value in budget.values()):
        node.budget.update(budget)  # a budget in one unit replaces the recorded one in another
    _make_absolute(node)
    changed = build_dataclass(TrainConfig, OmegaConf.to_container(node, resolve=True))
    return replace(changed, allow_targets=recorded.allow_targets)
