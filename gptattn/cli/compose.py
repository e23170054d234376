"""Composes overrides into typed settings with Hydra, and turns Hydra's errors into UserErrors."""

import difflib
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hydra import version
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from gptattn import command
from gptattn.cli.choices import CONF, LISTED, Options, check_choices, choices_in, no_place
from gptattn.cli.jobs import run_name, with_paths_quoted
from gptattn.cli.overlay import check_composed, read_config_text, register_checked_files
from gptattn.errors import ConfigError, UserError
from gptattn.settings.config import MASK_DOCUMENTS, TrainConfig, check, variant_name
from gptattn.settings.values import suggest, typed

CONFIG_NAME = "train"
FILLED_IN = (
    "is filled in from the files that the pattern names; for another setting, copy such a file to "
    "DIR/attn/NAME.yaml, change the copy, and give --config-dir=DIR and NAME in the pattern"
)
LISTS = ("pattern", "allow_targets")  # settings whose value is a list of names


def register_resolvers() -> None:
    """Register the `${run_name:...}` resolver, and our reader of config files with Hydra."""
    OmegaConf.register_new_resolver("run_name", run_name, use_cache=True, replace=True)
    register_checked_files()


def settings(overrides: Sequence[str] = ()) -> TrainConfig:
    """Return the checked settings of a run from overrides, such as `["attn=gqa", "seed=2"]`.

    Raises ConfigError, which names the field.
    """
    with composed(with_paths_quoted(overrides)) as cfg:
        found = to_train_config(cfg)
    check(found)
    return found


@contextmanager
def composed(
    overrides: Sequence[str],
    config_name: str = CONFIG_NAME,
    run_mode: RunMode = RunMode.RUN,
    config_dir: str | None = None,
) -> Iterator[DictConfig]:
    """Yield the config of one job, with hydra's node; inside, `${hydra:...}` resolves to it.

    `config_dir` is a config folder to search in addition to conf/. Errors of Hydra and OmegaConf,
    also those raised inside the with block, become UserErrors.
    """
    register_resolvers()
    version.setbase("1.3")
    before = HydraConfig.instance().cfg
    with complaints(overrides, config_dir), _hydra(config_dir) as loader:
        cfg = _load(loader, overrides, config_name, run_mode)
        HydraConfig.instance().set_config(cfg)
        try:
            yield cfg
        finally:
            HydraConfig.instance().cfg = before


@contextmanager
def _hydra(config_dir: str | None) -> Iterator[ConfigLoader]:
    """Yield the config loader of a Hydra that reads conf/, made as `hydra.main` makes it."""
    search = create_config_search_path(str(CONF))
    if config_dir is not None:
        folder, schema = Path(config_dir).absolute(), SearchPathQuery(provider="schema")
        search.prepend(provider="command-line", path=f"file://{folder}", anchor=schema)
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        yield Hydra.create_main_hydra2(CONFIG_NAME, search).config_loader
    finally:
        GlobalHydra.instance().hydra = outer


@contextmanager
def complaints(overrides: Sequence[str] = (), config_dir: str | None = None) -> Iterator[None]:
    """Turn errors of Hydra or OmegaConf about these overrides into UserErrors.

    `config_dir` is as in `composed`.
    """
    try:
        yield
    except OmegaConfBaseException as error:
        raise _from_omegaconf(error) from error
    except HydraException as error:
        raise _from_hydra(error, overrides, config_dir) from error


def _load(
    loader: ConfigLoader, overrides: Sequence[str], config_name: str, run_mode: RunMode
) -> DictConfig:
    try:
        check_choices(overrides, run_mode, _options(loader, overrides))
        with warnings.catch_warnings():
            # Hydra only warns about a missing folder, in several lines: make it an error.
            warnings.filterwarnings("error", message="provider=hydra.searchpath")
            cfg = loader.load_configuration(config_name, list(overrides), run_mode)
    except UserWarning as error:
        raise ConfigError("hydra.searchpath", f"{error}; give folders that exist") from error
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        # Errors that Hydra does not catch: numbers of thousands of digits, a group without a name.
        raise ConfigError("command line", f"Hydra cannot compose this: {error}") from error
    check_composed(cfg, overrides)
    _check_listed_names(loader, cfg, config_name, overrides, run_mode)
    return cfg


def _check_listed_names(
    loader: ConfigLoader,
    cfg: DictConfig,
    config_name: str,
    overrides: Sequence[str],
    run_mode: RunMode,
) -> None:
    """Raise ConfigError if the file of a chosen part or logger sets another name than its own."""
    chosen = {name for group in LISTED for name in cfg.get(group) or ()}
    given = any(re.match(rf"\+*({'|'.join(LISTED)})=", override) for override in overrides)
    if not given and chosen <= {"tensorboard"}:  # the default; looking takes a third of composing
        return
    for default in loader.compute_defaults_list(config_name, list(overrides), run_mode).defaults:
        group, _, name = (default.config_path or "").rpartition("/")
        # A part may be made from the file of another; only the chosen one has to bear its name.
        inherited = (default.parent or "").startswith(f"{group}/")
        if group in LISTED and not inherited and default.package != f"{group}.{name}":
            raise ConfigError(
                group,
                f"{name}.yaml sets {default.package or f'settings outside {group}'}; "
                f'its first line must be "# @package {group}.{name}"',
            )


def _options(loader: ConfigLoader, overrides: Sequence[str]) -> Options:
    """Return group -> the names of its files, in all folders that Hydra will search."""
    places = [override for override in overrides if re.match(r"\+*hydra\.searchpath=", override)]

    def names(group: str) -> list[str]:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="provider=hydra.searchpath")
            return loader.get_group_options(group, ObjectType.CONFIG, CONFIG_NAME, places)

    return names


def to_train_config(cfg: DictConfig) -> TrainConfig:
    """Return the typed settings of a composed config.

    Raises ConfigError for a value of the wrong type, or a `match_to` that is no variant.
    """
    settings = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
    OmegaConf.resolve(settings)
    OmegaConf.set_struct(settings, False)
    if settings.match != "none":
        settings.match_attn = _settings_of(
            "match_to", str(settings.match_to), settings, _searched()
        )
    if isinstance(settings.pattern, str):
        raise ConfigError("pattern", _no_list(settings.pattern))
    if settings.pattern_attn is not None:
        raise ConfigError("pattern_attn", FILLED_IN)
    found = typed(TrainConfig, OmegaConf.to_container(settings, throw_on_missing=True))
    chosen = HydraConfig.get().runtime.choices
    if any(chosen.get(group) != name for group, name in found.choices.items()):
        raise ConfigError(
            "choices", "only records what was chosen; choose with attn=..., model=..."
        )
    if (sources := found.data.get("sources")) is not None:
        found = replace(found, data=found.data | {"sources": _with_files(sources)})
    return found if found.pattern is None else _with_pattern(found, settings)


def _with_files(sources: Any) -> dict[str, Any]:
    """Return the texts of a mixture with the settings in their files in conf/data.

    Raises ConfigError for one without `data`, or with another setting than its file's.
    """
    if not isinstance(sources, dict):
        raise ConfigError("data.sources", "is no table; give {NAME:{data:text,path:FILE,weight:1}}")
    read = {
        name: OmegaConf.create(read_config_text(file))
        for name, file in _files(_searched("data")).items()
    }
    # A task's file sets more than its group.
    texts = {
        name: {key: value for key, value in _plain(node).items() if key != MASK_DOCUMENTS}
        for name, node in read.items()
        if isinstance(node, DictConfig) and "_target_" in node and "sources" not in node
    }
    found = {}
    for name, source in sources.items():
        field = f"data.sources.{name}"
        if not isinstance(source, dict):
            raise ConfigError(field, "is no table; give {data:text,path:FILE,weight:1}")
        if "_target_" in source:
            found[name] = source
            continue
        file = source.get("data")
        if file not in texts:
            raise ConfigError(f"{field}.data", f"{file!r} is no text; {suggest(str(file), texts)}")
        own = texts[file]
        for key in source:
            if key not in own and key not in ("data", "weight"):
                raise ConfigError(
                    f"{field}.{key}", f"is not a setting of {file}; {suggest(key, own)}"
                )
        found[name] = own | source
    return found


def _with_pattern(found: TrainConfig, settings: DictConfig) -> TrainConfig:
    """Return the settings with those of the pattern's variants, which take the place of `attn`.

    Raises ConfigError for a name that is no variant, and for an override of `attn`.
    """
    names = found.pattern or []
    specs = {name: _settings_of("pattern", name, settings, _searched()) for name in names}
    for override in HydraConfig.get().overrides.task:
        key = re.match(r"[+~]*([^=@]*)", override)
        if key is not None and re.match(r"attn(\.|$)", key.group(1)):
            raise _beside_pattern(key.group(1), names, specs)
    plain = {name: _plain(spec) for name, spec in specs.items()}
    choices = found.choices | {"attn": variant_name(names, [])}
    if len(plain) == 1:  # the same run as with attn=, and under the same name
        choices["attn"] = names[0]
        return replace(found, attn=plain[names[0]], choices=choices, pattern=None)
    return replace(found, attn={}, choices=choices, pattern_attn=plain)


def _beside_pattern(
    key: str, pattern: Sequence[str], specs: Mapping[str, DictConfig]
) -> ConfigError:
    """Return the error for an override of `key`, in `attn`, beside the pattern of these files."""
    setting = key.partition(".")[2].partition(".")[0]
    name = next((name for name, spec in specs.items() if setting in spec), next(iter(specs), ""))
    if not setting or not name:
        return ConfigError(key, no_place(list(pattern)))
    file = _files(_searched())[name]
    shown = f"conf/attn/{file.name}" if file.parent == CONF / "attn" else file
    way_out = f"copy {shown} to DIR/attn/NAME.yaml, change it, and give --config-dir=DIR"
    return ConfigError(key, f"{no_place(list(pattern))}, or {way_out}")


@complaints()
def attention_settings(variant: str, settings: TrainConfig) -> dict[str, Any]:
    """Return the settings in the variant's file in conf/attn, for a model of these settings."""
    return _plain(_settings_of("to", variant, OmegaConf.create(asdict(settings)), [CONF / "attn"]))


def _searched(group: str = "attn") -> list[Path]:
    """Return the folders of a group's files, in Hydra's order: the first with a name counts."""
    sources = HydraConfig.get().runtime.config_sources
    return [Path(source.path) / group for source in sources if source.schema == "file"]


def _files(folders: Sequence[Path]) -> dict[str, Path]:
    # A later key takes the place of an earlier one, and the first folder must win.
    return {file.stem: file for folder in reversed(folders) for file in folder.glob("*.yaml")}


def _settings_of(
    field: str, variant: str, settings: DictConfig, folders: Sequence[Path]
) -> DictConfig:
    """Return the variant's file with its interpolations resolved against `settings`."""
    files = _files(folders)
    if variant not in files:
        raise ConfigError(field, f"{variant!r} is not a variant; {suggest(variant, files)}")
    reference = OmegaConf.merge(settings, {})
    assert isinstance(reference, DictConfig)
    reference.attn = OmegaConf.create(read_config_text(files[variant]))
    OmegaConf.resolve(reference)
    spec = reference.attn
    assert isinstance(spec, DictConfig)
    return spec


def _plain(spec: DictConfig) -> dict[str, Any]:
    plain = OmegaConf.to_container(spec)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def composed_job(loader: ConfigLoader, config: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Return the config of one job of a sweep, with hydra's node; `config` is the sweep's config.

    Raises a UserError for overrides that do not compose.
    """
    hydras = list(config.hydra.overrides.hydra)
    own = [s.path for s in config.hydra.runtime.config_sources if s.provider == "command-line"]
    check_choices(overrides, RunMode.RUN, _options(loader, hydras))
    with complaints([*hydras, *overrides], own[0] if own else None):
        cfg = loader.load_sweep_config(config, list(overrides))
    check_composed(cfg, [*config.hydra.overrides.task, *overrides])
    name = str(config.hydra.job.config_name)
    _check_listed_names(loader, cfg, name, [*hydras, *overrides], RunMode.RUN)
    return cfg


def _from_omegaconf(error: OmegaConfBaseException) -> ConfigError:
    """Return the ConfigError for OmegaConf's error about a setting."""
    field = str(error.full_key or error.key or "config")
    if isinstance(error, MissingMandatoryValue):
        return ConfigError(field, "is missing; give a value")
    return ConfigError(field, (error.msg or str(error)).splitlines()[0])


def _from_hydra(
    error: HydraException, overrides: Sequence[str], config_dir: str | None
) -> UserError:
    """Return the UserError for Hydra's error about these overrides."""
    if isinstance(error, MissingConfigException):
        group, _, choice = (error.missing_cfg_file or "").rpartition("/")
        # Hydra gives no options for a name in a list.
        known = suggest(choice, error.options or choices_in(group))
        if choice.startswith("submitit"):
            return ConfigError("launcher", "needs the extra slurm: pip install 'gptattn[slurm]'")
        if group == "hydra/sweeper":
            return ConfigError(
                group, f"{choice!r} is not used here; {command('tune')} searches learning rates"
            )
        if not group:
            return ConfigError(
                "--config-name", f"{choice!r} does not exist; {CONFIG_NAME} is the default"
            )
        return ConfigError(group, f"{choice!r} is unknown; {known}")
    if isinstance(error, OverrideParseException):
        return ConfigError(
            error.override,
            "cannot be read; write name=value, or 'name=\"value\"' for special characters",
        )
    message, cause = str(error), error.__cause__
    match = re.search(r"Could not (?:override|delete|append)[^']*'([^']+)'", message)
    if match is None and isinstance(cause, OmegaConfBaseException):
        return _from_omegaconf(cause)
    if "Could not delete" in message and match is not None:
        return ConfigError(match.group(1), "cannot be removed; give it a value instead")
    if "already at" in message and match is not None:
        return ConfigError(
            match.group(1), f"already exists; write {match.group(1)}=... without the +"
        )
    several = re.search(r"Ambiguous value for argument '([^=]+)=([^']*)'", message)
    if several is not None and several.group(1) in LISTS:
        return ConfigError(several.group(1), _no_list(several.group(2)))
    if several is not None:
        return ConfigError(
            several.group(1), f"{several.group(2)} gives several values; add -m to run each"
        )
    if match is None:
        return ConfigError("command line", message)
    return _unknown_key(match.group(1), overrides, config_dir)


def _no_list(text: str) -> str:
    return f"{text} is not a list; write [{text.removeprefix('[').removesuffix(']')}]"


def _unknown_key(key: str, overrides: Sequence[str], config_dir: str | None) -> ConfigError:
    # Which settings exist depends on the chosen config files.
    choices = [o for o in overrides if re.match(r"([\w/]+|\+*hydra\.searchpath)=", o)]
    choices = [o for o in choices if not o.startswith(f"{key}=")]
    keys = _keys(choices, config_dir)
    group, _, below = key.partition(".")
    if group == "pattern_attn":
        return ConfigError(key, FILLED_IN)
    listed = [name for name in keys if re.fullmatch(rf"{group}\.[^.]+", name)]
    if group in LISTED and below and not any(key.startswith(f"{name}.") for name in listed):
        name = below.partition(".")[0]
        wanted = ",".join([*(one.removeprefix(f"{group}.") for one in listed), name])
        return ConfigError(key, f"needs the {group} {name}; give {group}=[{wanted}] as well")
    siblings = [name for name in keys if name.startswith(f"{key.rpartition('.')[0]}.")]
    having = [
        name
        for name in sorted(choices_in(group))
        if group not in LISTED and key in _keys([*choices, f"{group}={name}"], config_dir)
    ]
    if having:
        known = _which_sets(group, having, below)
        either = " or ".join(filter(None, [", ".join(having[:-1]), having[-1]]))
        has = f"{either} has it: {group}={known or 'NAME'}"
        return ConfigError(key, f"is not a setting here; {has}")
    if "." in key and siblings:
        return ConfigError(key, f"is not a setting; {suggest(key, siblings)}")
    above = key.rpartition(".")[0]
    if above in keys:
        return ConfigError(key, f"is not a setting; {above} has none")
    near = difflib.get_close_matches(key, keys, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}? " if near else ""
    return ConfigError(key, f"is not a setting; {hint}--help lists them all")


def _which_sets(group: str, names: Sequence[str], key: str) -> str | None:
    """Return the one of these choices whose file gives the setting a value; None if several do."""
    if len(names) == 1:
        return names[0]
    nodes = {n: OmegaConf.create(read_config_text(CONF / group / f"{n}.yaml")) for n in names}
    setting = [n for n, node in nodes.items() if OmegaConf.select(node, key) is not None]
    return setting[0] if len(setting) == 1 else None


def _keys(choices: Sequence[str], config_dir: str | None) -> list[str]:
    # MULTIRUN, since the choices may be a sweep's lists of values, which it sets aside.
    with composed(choices, run_mode=RunMode.MULTIRUN, config_dir=config_dir) as cfg:
        names = [name for name in _dotted_keys(cfg) if not name.startswith("hydra.")]
    # A _target_ is chosen with its file, so it is no hint.
    return [name for name in names if not name.endswith("._target_")]


def _dotted_keys(node: Any, prefix: str = "") -> Iterator[str]:
    for key in node:
        name = f"{prefix}{key}"
        yield name
        child = node._get_node(key)
        if isinstance(child, DictConfig) and not child._is_none():
            yield from _dotted_keys(child, f"{name}.")
