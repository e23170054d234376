"""The settings of a run that goes on: those that it has, and the few that may be changed."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from gptattn.errors import ConfigError
from gptattn.settings.config import TrainConfig, check, suggest
from gptattn.settings.identity import MAY_CHANGE, meaning

BUDGETS = ("steps", "tokens", "seconds", "flops")


def resume_argument(overrides: Sequence[str]) -> tuple[str | None, list[str]]:
    """The folder of `resume=FOLDER` where that is given, and the other overrides."""
    folders = [o.partition("=")[2] for o in overrides if o.startswith("resume=")]
    others = [o for o in overrides if not o.startswith("resume=")]
    if len(folders) > 1 or "" in folders:
        raise ConfigError("resume", "takes one run folder")
    if not folders:
        return None, others
    quoted = folders[0][:1] in ("'", '"')
    return str(_parsed(f"resume={folders[0]}").value()) if quoted else folders[0], others


def allowed_packages(overrides: Sequence[str]) -> list[str]:
    """What `allow_targets=[...]` says among the overrides: the record's own does not count."""
    packages: Any = []
    for override in overrides:
        if override.startswith("allow_targets="):
            packages = _parsed(override).value()
    if not isinstance(packages, list) or not all(isinstance(name, str) for name in packages):
        raise ConfigError("allow_targets", "is no list of packages; give allow_targets=[PACKAGE]")
    return [str(name) for name in packages]


def resumed(recorded: TrainConfig, overrides: Sequence[str], threads: int | None) -> TrainConfig:
    """The settings of the record, changed by what may be.

    `threads`: those that the run had. Raises ConfigError, naming the field, for a change that
    would make another run of it.
    """
    settings = OmegaConf.merge(OmegaConf.structured(TrainConfig), asdict(recorded))
    assert isinstance(settings, DictConfig)
    OmegaConf.set_struct(settings, True)
    given = [_parsed(override) for override in overrides]
    for override in given:
        _apply(settings, override, recorded, threads)
    kinds = [o.key_or_group.removeprefix("budget.") for o in given if o.value() is not None]
    kinds = [kind for kind in kinds if kind in BUDGETS]
    for other in BUDGETS:
        # One kind of budget takes the place of another.
        if len(kinds) == 1 and other != kinds[0]:
            settings.budget[other] = None
    typed = OmegaConf.to_object(settings)
    assert isinstance(typed, TrainConfig)
    check(typed)
    return typed


def _parsed(override: str) -> Override:
    try:
        return OverridesParser.create().parse_override(override)
    except HydraException:
        raise ConfigError(
            override, "cannot be read; write name=value, or 'name=\"value\"' for odd characters"
        ) from None


def _apply(
    settings: DictConfig, override: Override, recorded: TrainConfig, threads: int | None
) -> None:
    key = override.key_or_group
    added = override.is_add() or override.is_force_add()
    if added or override.is_delete() or override.is_sweep_override() or override.package:
        raise ConfigError(key, "a run that goes on takes name=value alone")
    value: Any = override.value()
    if key in recorded.choices:
        _compare(key, value, recorded.choices[key])
    elif key == "trainer" and isinstance(value, str):
        _compare("trainer", value, recorded.trainer.accelerator)
    elif key.partition(".")[0].partition("/")[0] in ("hydra", "experiment", "launcher"):
        raise ConfigError(key, "is settled: the run stays as it is, in its folder; leave it out")
    elif key.partition(".")[0] not in settings:
        raise ConfigError(key, f"is no setting; {suggest(key, map(str, settings))}")
    else:
        known = list(_names(asdict(recorded)))
        if key not in known:
            raise ConfigError(key, f"is no setting; {suggest(key, known)}")
        before = OmegaConf.select(settings, key)
        before = OmegaConf.to_object(before) if OmegaConf.is_config(before) else before
        if key == "trainer.threads" and value == threads:
            return
        try:
            OmegaConf.update(settings, key, value)
        except OverflowError:  # of a whole number with hundreds of digits
            raise ConfigError(key, "is too large for any number; give less") from None
        if not meaning(key).resumes:
            after = OmegaConf.select(settings, key)
            after = OmegaConf.to_object(after) if OmegaConf.is_config(after) else after
            _compare(key, after, before if key != "trainer.threads" else threads or before)


def _names(node: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """The dotted names of all settings."""
    for key, value in node.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _names(value, f"{prefix}{key}.")


def _compare(key: str, value: Any, recorded: Any) -> None:
    if value != recorded:
        raise ConfigError(
            key,
            f"is {recorded} in this run, and {value} would make it another; leave it out, or start "
            f"a run of its own ({MAY_CHANGE} may change)",
        )
