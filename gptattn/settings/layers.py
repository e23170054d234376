"""Turns `pattern`, `layers` and the files they name into the settings of each kind of layer."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from hydra import compose
from hydra.errors import MissingConfigException
from omegaconf import DictConfig, OmegaConf

from gptattn.errors import ConfigError
from gptattn.settings.config import Settings, Spec
from gptattn.settings.construct import arguments_of, find_target
from gptattn.settings.values import suggest

GROUPS = {"attn": "attention", "position": "position", "part": "part"}  # of a layer
MIN_TOKENS = 8  # of a window that shrinks with the context


def read_files(
    field: str, choices: Mapping[str, Sequence[str]], cfg: DictConfig, folders: Sequence[Path]
) -> dict[str, Any]:
    """Return what the chosen files set, by config group, for a model of the composed settings.

    `choices`: config group -> names of files in one of the folders, or wherever Hydra searches.
    Raises ConfigError, naming `field`, for a name that has no file.
    """
    root = OmegaConf.masked_copy(cfg, [str(k) for k in cfg if k not in ("hydra", *choices)])
    OmegaConf.set_struct(root, False)
    for group, names in choices.items():
        root[group] = {}
        for name in names:
            root.merge_with(_read_file(field, group, name, folders))
    return {group: OmegaConf.to_container(root[group], resolve=True) for group in choices}


def _read_file(field: str, group: str, name: str, folders: Sequence[Path]) -> DictConfig:
    files = [folder / group / f"{name}.yaml" for folder in folders]
    file = next((file for file in files if file.is_file()), None)
    node = OmegaConf.load(file) if file else OmegaConf.create()
    assert isinstance(node, DictConfig)
    if file and "defaults" not in node:  # Hydra would take a tenth of a second to read it
        return OmegaConf.create({group: {name: node} if group == "part" else node})
    choice = f"[{quote(name)}]" if group == "part" else quote(name)
    searched = ",".join(quote(f"file://{folder}") for folder in folders)
    overrides = [f"{group}={choice}", f"hydra.searchpath=[{searched}]"]
    try:
        return OmegaConf.masked_copy(compose("train", overrides), [group])
    except MissingConfigException as error:
        hint = suggest(name, error.options or [])
        raise ConfigError(field, f"{name!r} is not in conf/{group}; {hint}") from error


def read_layers(
    command: Settings,
    keys: Sequence[str],
    cfg: DictConfig,
    folders: Sequence[Path],
    allow_targets: Sequence[str],
    recipe: str | None = None,
) -> dict[str, dict[str, Any]]:
    """Return the settings of each name in the pattern: a layer of `layers`, or a file in conf/attn.

    `keys`: the names of all settings on the command line. A setting for all layers, such as
    `attn.window`, applies where a file gives it a value; if none does, where a file or constructor
    has it at all. A choice applies to layers that list it. Raises ConfigError, naming the setting
    and, if a recipe brought the pattern, the `recipe`.
    """
    assert command.pattern is not None
    shown = f"pattern=[{','.join(command.pattern)}]" if recipe is None else f"recipe={recipe}"
    # A pattern may leave out layers of a recipe, but none that were typed.
    typed = {key.split(".")[1] for key in keys if key.startswith("layers.")}
    for name in command.layers if "layers" in keys else sorted(typed):
        if name not in command.pattern:
            raise ConfigError(
                f"layers.{name}", f"is not in {shown}; {suggest(name, command.pattern)}"
            )
    layers = {
        name: _read_layer(name, command.layers.get(name), cfg, folders)
        for name in dict.fromkeys(command.pattern)
    }
    for group in ("attn", "position"):
        if group in keys and all(group in layer for layer in layers.values()):
            raise ConfigError(
                group,
                f"cannot be combined with {shown}, which names each layer's {GROUPS[group]}; leave "
                "one of them out",
            )
    for key in keys:
        group, _, setting = key.partition(".")
        if group not in GROUPS or not setting:
            continue
        part, _, setting = setting.partition(".") if group == "part" else ("", "", setting)
        setting = setting.partition(".")[0]
        specs = {
            name: spec
            for name, layer in layers.items()
            if (spec := layer.get(group, {}).get(part) if part else layer.get(group))
        }
        if not specs:  # it is the model's
            continue
        takes = {
            name: arguments_of(find_target(f"pattern.{name}", spec, allow_targets))
            for name, spec in specs.items()
        }
        having = [name for name, spec in specs.items() if spec.get(setting) is not None]
        for name, spec in specs.items() if not having else ():
            arguments = takes[name]
            has_argument = setting in arguments.types or arguments.others
            having += [name] * (setting in spec or has_argument)
        if not having:
            hint = suggest(setting, {one for spec in specs.values() for one in spec} - {"_target_"})
            raise ConfigError(key, f"no {GROUPS[group]} in {shown} has it; {hint}")
        value = getattr(command, group)
        value = value[part][setting] if part else value[setting]
        # backend=fla is for the layers with a state, backend=flex for the others.
        able = [name for name in having if value in get_args(takes[name].types.get(setting))]
        for name in able or having:
            specs[name][setting] = value
    return layers


def _read_layer(
    name: str, written: Any, cfg: DictConfig, folders: Sequence[Path]
) -> dict[str, Any]:
    """Return a layer's settings from its entry in `layers`; if None, from a conf/attn file."""
    if written is None:
        return read_files("pattern", {"attn": [name]}, cfg, folders)
    field = f"layers.{name}"
    if not isinstance(written, dict) or "attn" not in written:
        raise ConfigError(field, "has no attention; give {attn: gqa}, for example")
    chosen: dict[str, dict[str, Spec]] = {}
    for group, choice in written.items():
        if group not in GROUPS:
            raise ConfigError(f"{field}.{group}", f"is not a setting; {suggest(group, GROUPS)}")
        names = choice if isinstance(choice, dict | list) else [choice]
        chosen[group] = {
            str(one): (choice[one] or {}) if isinstance(choice, dict) else {} for one in names
        }
        if group != "part" and len(chosen[group]) != 1:
            typed = " and ".join(chosen[group]) or "none"
            raise ConfigError(
                f"{field}.{group}", f"takes one name, not {typed}; give {field}.{group}=NAME"
            )
    layer = read_files(field, {group: [*own] for group, own in chosen.items()}, cfg, folders)
    for group, own in chosen.items():
        for one, settings in own.items():
            spec = layer[group][one] if group == "part" else layer[group]
            spec.update(settings)
    return layer


def quote(value: str) -> str:
    """Quote a value for Hydra's override grammar."""
    # Hydra reads two backslashes as one only before a quote and at the end: double them there.
    escaped = re.sub(r"(\\+)('|$)", r"\1\1\2", value).replace("'", "\\'")
    return f"'{escaped}'"


# Resolvers with which a recipe's numbers follow the model, in YAML as ${groups_of:8},
# ${tokens:128,4096} and ${head_size_to:-1}.


def choose_kv_heads(group: int, _root_: DictConfig) -> int:
    """Return the fewest heads, 2 or more if possible, with at most `group` query heads each."""
    heads = _root_.model.num_heads
    divisors = [n for n in range(min(2, heads), heads + 1) if heads % n == 0]
    return next(n for n in divisors if heads // n <= group)


def scale_tokens(tokens: int, context: int, _root_: DictConfig) -> int:
    """Scale `tokens` of `context` to the model's context length; return MIN_TOKENS or more."""
    length = _root_.model.context_length
    return min(length, max(MIN_TOKENS, math.ceil(tokens * length / context)))


def head_size_to(power: float, _root_: DictConfig) -> float:
    """Return the size of the model's heads to this power."""
    return (_root_.model.d_model / _root_.model.num_heads) ** power


OmegaConf.register_new_resolver("head_size_to", head_size_to, replace=True)
OmegaConf.register_new_resolver("groups_of", choose_kv_heads, replace=True)
OmegaConf.register_new_resolver("tokens", scale_tokens, replace=True)
