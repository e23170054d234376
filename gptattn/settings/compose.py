"""From Hydra's composed config to a run's settings, and the variants' files that it names."""

import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import MissingConfigException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from gptattn.errors import ConfigError
from gptattn.settings.config import MASK_DOCUMENTS, Spec, TrainConfig, check, variant_name
from gptattn.settings.construct import check_targets
from gptattn.settings.messages import from_hydra_error
from gptattn.settings.values import from_omegaconf, suggest

# conf/ lies beside the package in a source tree, and inside it in a wheel.
CONF = next(
    folder
    for folder in (Path(__file__).parents[1] / "conf", Path(__file__).parents[2] / "conf")
    if folder.is_dir()
)
OPEN = ("attn", "part", "position", "data", "tokenizer", "logger")  # their constructors check keys
FILLED_IN = ("choices", "pattern_attn", "match_attn", "match_made")
# What a file of another variant is not composed with, since this run's command says it of its own.
OWN = ("attn", "pattern", "match", "run_dir", "resume")


@dataclass
class Command(TrainConfig):
    """What a command line takes: a run's settings, and what is not recorded with them.

    `run_dir`: the run's folder; None: a new one in outputs/. `resume`: the folder of a run.
    """

    run_dir: str | None = None
    resume: str | None = None


def register_schema() -> None:
    """Give Hydra the types of all settings, under the name that conf/train.yaml begins with."""
    schema = OmegaConf.structured(Command)
    for name, kind in get_type_hints(Command).items():
        if is_dataclass(kind):  # it would be missing as a whole, and Hydra could not merge into it
            schema[name] = OmegaConf.structured(kind)
    for group in OPEN:
        schema[group] = {}
        OmegaConf.set_struct(schema[group], False)
    ConfigStore.instance().store("schema", schema)


register_schema()


def settings(overrides: Sequence[str] = ()) -> TrainConfig:
    """Return the checked settings of a run from overrides, such as `["attn=gqa", "seed=2"]`.

    Raises ConfigError, which names the field.
    """
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
            cfg = compose("train", list(overrides), return_hydra_config=True)
            found = from_hydra(cfg, cfg.hydra)
    except Exception as error:
        raise from_hydra_error(error, overrides, CONF) from error
    check(found)
    return found


def from_hydra(cfg: DictConfig, hydra: DictConfig) -> TrainConfig:
    """Return the settings of a composed job, not yet checked; `hydra` is the job's hydra node.

    Raises ConfigError for a name in `pattern`, `match_to` or `data.sources` that is no file.
    """
    cfg = deepcopy(cfg)
    with open_dict(cfg):
        cfg.pop("hydra", None)
    typed = [str(override) for override in hydra.overrides.task]
    for name in FILLED_IN:
        if any(_key(override).partition(".")[0] == name for override in typed):
            raise ConfigError(name, "is filled in for the record; leave it out")
    try:
        command: Any = OmegaConf.to_object(cfg)
    except OmegaConfBaseException as error:
        raise from_omegaconf(error) from error
    values = {field.name: getattr(command, field.name) for field in fields(TrainConfig)}
    groups = ("attn", "block", "model", "position", "data", "tokenizer", "optim")
    values["choices"] = {group: str(hydra.runtime.choices.get(group)) for group in groups}
    found = TrainConfig(**values)

    typed += [o for o in map(str, hydra.overrides.hydra) if o.startswith("hydra.searchpath=")]
    if found.match != "none":
        found = replace(found, match_attn=_file("match_to", "attn", found.match_to, typed))
    if found.pattern is not None:
        found = _with_pattern(found, typed)
    if isinstance(found.data.get("sources"), dict):
        found = replace(found, data=found.data | {"sources": _with_files(found.data, typed)})
    check_targets(vars(found), found.allow_targets)
    return found


def _key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0].partition("@")[0]


def _file(field: str, group: str, name: str, typed: Sequence[str]) -> Spec:
    """Return the settings in the file `name` of a group, for a model of the typed settings."""
    own = (*OWN, group)
    others = [o for o in typed if _key(o).partition(".")[0].partition("_")[0] not in own]
    try:
        node = compose("train", [*others, f"{group}={quoted(name)}"])[group]
    except MissingConfigException as error:
        known = suggest(name, error.options or [])
        raise ConfigError(field, f"{name!r} is not in conf/{group}; {known}") from error
    spec = OmegaConf.to_container(node, resolve=True)
    assert isinstance(spec, dict)
    return {str(key): value for key, value in spec.items()}


def _with_pattern(found: TrainConfig, typed: Sequence[str]) -> TrainConfig:
    """Return the settings with those of the pattern's variants, which take the place of `attn`."""
    names = found.pattern or []
    given = [_key(o) for o in typed if _key(o).partition(".")[0] == "attn"]
    if given:
        listed = ",".join(names)
        raise ConfigError(
            given[0],
            f"has no place beside pattern=[{listed}], which names the attention of each layer; "
            "leave one of them out, or change a copy of its file: copy conf/attn/NAME.yaml to "
            "DIR/attn/NEW.yaml and give --config-dir=DIR",
        )
    specs = {name: _file("pattern", "attn", name, typed) for name in names}
    if len(specs) == 1:  # the same run as with attn=, and under the same name
        choices = found.choices | {"attn": names[0]}
        return replace(found, attn=specs[names[0]], choices=choices, pattern=None)
    choices = found.choices | {"attn": variant_name(names, [])}
    return replace(found, attn={}, choices=choices, pattern_attn=specs)


def _with_files(data: Spec, typed: Sequence[str]) -> dict[str, Any]:
    """Return the texts of a mixture with the settings in their files in conf/data."""
    found = {}
    for name, source in data["sources"].items():
        field = f"data.sources.{name}"
        if not isinstance(source, dict):
            raise ConfigError(field, "is no table; give {data:text,path:FILE,weight:1}")
        if "_target_" in source:
            found[name] = source
            continue
        spec = _file(f"{field}.data", "data", str(source.get("data")), typed)
        own = {key: value for key, value in spec.items() if key != MASK_DOCUMENTS}
        for key in source:
            if key not in own and key not in ("data", "weight"):
                known = suggest(str(key), own)
                raise ConfigError(
                    f"{field}.{key}", f"is not a setting of {source['data']}; {known}"
                )
        found[name] = own | source
    return found


def attention_settings(variant: str, cfg: TrainConfig) -> Spec:
    """Return the settings in the variant's file in conf/attn, for a model of these settings.

    Raises ConfigError, naming `to`, if there is no such file.
    """
    files = {file.stem: file for file in (CONF / "attn").glob("*.yaml")}
    if variant not in files:
        raise ConfigError("to", f"{variant!r} is not a variant; {suggest(variant, files)}")
    node = OmegaConf.create({"model": asdict(cfg.model), "attn": OmegaConf.load(files[variant])})
    spec = OmegaConf.to_container(node.attn, resolve=True)
    assert isinstance(spec, dict)
    return {str(key): value for key, value in spec.items()}


def quoted(value: str) -> str:
    """Quote a value for Hydra's override grammar."""
    # Hydra reads two backslashes as one only before a quote and at the end: double them there.
    escaped = re.sub(r"(\\+)('|$)", r"\1\1\2", value).replace("'", "\\'")
    return f"'{escaped}'"
