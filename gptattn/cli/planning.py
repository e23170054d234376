"""Turns the overrides of each run of a sweep into its Plan."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import get_overrides_dirname
from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from gptattn.cli.compose import composed_job, to_train_config
from gptattn.cli.jobs import SUBDIR
from gptattn.errors import ConfigError
from gptattn.sweep.plan import Plan

_Job = tuple[int, list[Override], dict[str, Any]]  # its number, overrides, and plain values


def planned(
    loader: ConfigLoader,
    config: DictConfig,
    jobs: Sequence[Sequence[str]],
    number: int = 0,
    shared: Collection[str] | None = None,
) -> Iterator[tuple[int, Plan]]:
    """Yield (job number, plan) for each job, in any order; the first job's number is `number`.

    A job is its list of overrides; `config` is the sweep's config. `shared` are the overrides that
    runs' names leave out; None: those that all of these jobs have. Hydra takes 0.1 s to compose a
    job, so jobs that differ only in plain values, such as the seed, share one composition. Their
    values are then set in it as Hydra would set them, and interpolations are resolved again for
    each job. Raises a UserError for overrides that do not compose.
    """
    shared = common(jobs) if shared is None else shared
    alike: dict[tuple[str, ...], list[_Job]] = defaultdict(list)
    for i, job in enumerate(jobs, number):
        parsed = [_parsed(override) for override in job]
        values = _values(config, parsed)
        kind = tuple(
            o.key_or_group if o.key_or_group in values else str(o.input_line) for o in parsed
        )
        alike[kind].append((i, parsed, values))
    for group in alike.values():
        cfg = composed_job(loader, config, [str(o.input_line) for o in group[0][1]])
        for i, parsed, values in group:
            for key, value in values.items():
                OmegaConf.update(cfg, key, value, merge=True)
            _set_job_fields(cfg, config, i, parsed)
            yield i, _plan(cfg, parsed, shared)


# The jobs of a sweep have most of their overrides in common. Nobody changes one that is parsed.
@lru_cache(maxsize=4096)
def _parsed(override: str) -> Override:
    (parsed,) = OverridesParser.create().parse_overrides([override])
    return parsed


def common(jobs: Sequence[Sequence[str]]) -> set[str]:
    """Return the overrides that all jobs have."""
    return set.intersection(*map(set, jobs)) if jobs else set()


def _values(config: DictConfig, job: Sequence[Override]) -> dict[str, Any]:
    """Return key -> value for the overrides of the job that do no more than set a plain value.

    The key must hold a plain value in `config`, and no other override may touch it.
    """
    keys = [override.key_or_group for override in job]
    found = {}
    for override in job:
        key, value = override.key_or_group, override.value()
        alone = sum(f"{key}.".startswith(f"{other}.") for other in keys) == 1
        changes = override.type == OverrideType.CHANGE and override.package is None
        plain = value is None or isinstance(value, str | int | float)
        if alone and changes and plain and _is_value(config, key):
            found[key] = value
    return found


def _is_value(config: DictConfig, key: str) -> bool:
    """Whether `key` is a plain value in `config`: no group, no `_target_`, not in hydra's node."""
    parent, _, name = key.rpartition(".")
    node = OmegaConf.select(config, parent) if parent else config
    if key.startswith("hydra.") or name == "_target_" or key in config.hydra.runtime.choices:
        return False
    has = isinstance(node, DictConfig) and name in node
    return has and not OmegaConf.is_config(node._get_node(name))


def _set_job_fields(
    cfg: DictConfig, config: DictConfig, number: int, job: Sequence[Override]
) -> None:
    """Set the fields of hydra's node that describe the job, as Hydra does."""
    own = [override for override in job if not override.is_hydra_override()]
    with read_write(cfg.hydra), open_dict(cfg.hydra):
        cfg.hydra.overrides.task = [str(override.input_line) for override in own]
        cfg.hydra.job.id = cfg.hydra.job.num = number
        form = cfg.hydra.job.config.override_dirname
        cfg.hydra.job.override_dirname = get_overrides_dirname(
            own, kv_sep=form.kv_sep, item_sep=form.item_sep, exclude_keys=form.exclude_keys
        )
    # Cached resolver results of the previous job must not be reused; those of the sweep must.
    OmegaConf.copy_cache(from_config=config, to_config=cfg)


def _plan(cfg: DictConfig, job: Sequence[Override], shared: Collection[str]) -> Plan:
    """Return the plan of this composed job, with its final folder name.

    `shared` are the overrides that all jobs have; they are left out of the names.
    """
    before = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(cfg)
    try:
        typed = to_train_config(cfg)
        with read_write(cfg.hydra):
            varying = [o for o in cfg.hydra.overrides.task if o not in shared]
            cfg.hydra.overrides.task = varying
        name = str(cfg.hydra.sweep.subdir)
        home = Path(cfg.hydra.sweep.dir)
    finally:
        HydraConfig.instance().cfg = before
    if name in ("", ".", "..") or Path(name).name != name:
        raise ConfigError(
            "hydra.sweep.subdir", f"{name!r} is not a folder name in {home}; leave it out"
        )
    overrides = [str(override.input_line) for override in job]
    return Plan([o for o in overrides if not o.startswith(SUBDIR)], typed, home / name)
