"""The runs that a sweep's command line makes: from the overrides of each to its Plan."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import get_overrides_dirname
from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from gptattn.cli.compose import SUBDIR, composed_job, to_train_config
from gptattn.errors import ConfigError
from gptattn.sweep.plan import Plan


def planned(
    loader: ConfigLoader, config: DictConfig, jobs: Sequence[Sequence[str]], number: int = 0
) -> Iterator[tuple[int, Plan]]:
    """Each of these jobs' number, the first one's being `number`, and its plan; in any order.

    `config` is the sweep's own. Hydra takes 0.1 s to compose a job, so jobs that differ in plain
    values alone, as in a seed, share a composition. In it the values are set the way that Hydra
    sets them, and all that interpolates them is resolved anew for each job. Raises a UserError for
    overrides that do not compose.
    """
    parser = OverridesParser.create()
    shared = set.intersection(*map(set, jobs)) if jobs else set[str]()
    alike: dict[tuple[str, ...], list[tuple[int, list[Override]]]] = defaultdict(list)
    for i, job in enumerate(jobs, number):
        parsed = parser.parse_overrides(list(job))
        values = _values(config, parsed)
        kind = tuple(
            o.key_or_group if o.key_or_group in values else str(o.input_line) for o in parsed
        )
        alike[kind].append((i, parsed))
    for group in alike.values():
        cfg = composed_job(loader, config, [str(o.input_line) for o in group[0][1]])
        for i, parsed in group:
            for key, value in _values(config, parsed).items():
                OmegaConf.update(cfg, key, value, merge=True)
            _tell_hydra(cfg, config, i, parsed)
            yield i, _plan(cfg, parsed, shared)


def _values(config: DictConfig, job: Sequence[Override]) -> dict[str, Any]:
    """The plain values that it gives to what is one in `config`, where nothing else touches it."""
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
    """Whether `config` has a single value there: no group, no part of Hydra's, no class's name."""
    parent, _, name = key.rpartition(".")
    node = OmegaConf.select(config, parent) if parent else config
    if key.startswith("hydra.") or name == "_target_" or key in config.hydra.runtime.choices:
        return False
    has = isinstance(node, DictConfig) and name in node
    return has and not OmegaConf.is_config(node._get_node(name))


def _tell_hydra(cfg: DictConfig, config: DictConfig, number: int, job: Sequence[Override]) -> None:
    """What Hydra's own node says of a job."""
    own = [override for override in job if not override.is_hydra_override()]
    with read_write(cfg.hydra), open_dict(cfg.hydra):
        cfg.hydra.overrides.task = [str(override.input_line) for override in own]
        cfg.hydra.job.id = cfg.hydra.job.num = number
        form = cfg.hydra.job.config.override_dirname
        cfg.hydra.job.override_dirname = get_overrides_dirname(
            own, kv_sep=form.kv_sep, item_sep=form.item_sep, exclude_keys=form.exclude_keys
        )
    # What a resolver said for one job it need not say for the next; of the sweep it keeps.
    OmegaConf.copy_cache(from_config=config, to_config=cfg)


def _plan(cfg: DictConfig, job: Sequence[Override], shared: Collection[str]) -> Plan:
    """The run of this composed job, its folder's name settled.

    `shared` are the overrides of all jobs: they tell none from another, and stand in no name.
    """
    before = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(cfg)
    try:
        typed = to_train_config(cfg)
        with read_write(cfg.hydra):
            telling = [o for o in cfg.hydra.overrides.task if o not in shared]
            cfg.hydra.overrides.task = telling
        name = str(cfg.hydra.sweep.subdir)
        home = Path(cfg.hydra.sweep.dir)
    finally:
        HydraConfig.instance().cfg = before
    if name in ("", ".", "..") or Path(name).name != name:
        raise ConfigError(
            "hydra.sweep.subdir", f"{name!r} is no name of a folder in {home}; leave it out"
        )
    overrides = [str(override.input_line) for override in job]
    return Plan([o for o in overrides if not o.startswith(SUBDIR)], typed, home / name)
