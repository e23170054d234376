"""Plans the runs of a sweep, and finds those that are already done."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, read_write

from gptattn.errors import DAMAGE, ConfigError, NumericError, UserError
from gptattn.runs.folder import RunFolder, find_begun, name_run
from gptattn.settings.budget import limit_validation
from gptattn.settings.compose import from_hydra
from gptattn.settings.config import CONF, TrainConfig, check
from gptattn.settings.identity import Provenance, differences, flat, settings_key, typed_paths
from gptattn.settings.messages import explain_hydra_error, name_typed
from gptattn.sweep.jobs import VARIANTS, Job

DIVERGED = NumericError.exit_code
# Exit codes after which a restart would fail again: settings, data, checkpoint, NaN.
FINAL_EXIT_CODES = (2, 3, 4, DIVERGED)
# Jobs that differ only in these numbers share a composition, which takes Hydra 0.2 seconds:
# `from_hydra` later resolves what refers to a number.
NUMBERS = re.compile(r"(seed|optim\.lr)=([\d.e+-]+)")
# The slow checks of model and data do not depend on these settings: one check covers all values.
NOT_CHECKED = ("seed", "optim", "budget")


@dataclass(frozen=True)
class Plan:
    """One planned run that has passed its checks, and its folder."""

    overrides: list[str]
    cfg: TrainConfig  # with the match applied
    folder: Path
    bytes_on_disk: int  # expected size of the folder
    provenance: Provenance  # that a run started now would have


def plan_jobs(
    loader: ConfigLoader,
    config: DictConfig,
    refused: dict[str, UserError],
    jobs: Sequence[Job],
    home: Path,
) -> list[Plan]:
    """Return the plans of the jobs, seed by seed: a sweep stopped early has run every variant.

    `config` is the sweep's. An invalid job is left out, and its error is added to `refused`, under
    the overrides that only the jobs with this error share. Raises the first error if no job is
    left.
    """
    import torch  # slow to import, like the others

    from gptattn.training.contract import check_layers
    from gptattn.training.preflight import preflight

    composed: dict[tuple[str, ...], DictConfig] = {}
    found: list[tuple[Job, TrainConfig]] = []
    errors: dict[str, tuple[UserError, list[Job]]] = {}

    @contextmanager
    def refuse(job: Job) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            explained = explain_hydra_error(error, job.overrides, CONF)
            if not isinstance(explained, UserError):
                raise
            named = name_typed(explained, job.overrides)
            how = f"; in {VARIANTS}: {job.variant}" * bool(job.variant)
            named = type(named)(named.field, named.message + how)
            errors.setdefault(str(named), (named, []))[1].append(job)

    before = HydraConfig.instance().cfg
    for job in jobs:
        own = {m[1]: m[2] for m in map(NUMBERS.fullmatch, job.overrides) if m}
        others = (o for o in job.overrides if not NUMBERS.fullmatch(o))
        alike = (*sorted(own), *others)
        with refuse(job):
            if alike not in composed:
                composed[alike] = loader.load_sweep_config(config, job.overrides)
            node = composed[alike]
            node.merge_with_dotlist([f"{name}={value}" for name, value in own.items()])
            with read_write(node.hydra):
                node.hydra.overrides.task = job.overrides
            HydraConfig.instance().set_config(node)
            if node.compile == "auto":  # an earlier stage can have decided it
                node.compile = config.compile
            found.append((job, from_hydra(node, node.hydra)))
    HydraConfig.instance().cfg = before
    found.sort(key=lambda one: one[1].seed)
    shared = set.intersection(*(set(job.overrides) for job in jobs))  # left out of the names
    # Keep only this from each check: the data and weights of many runs would fill the memory.
    checks: dict[str, tuple[TrainConfig, int, Provenance] | UserError] = {}
    plans: list[Plan] = []
    first, decided = dict[tuple[str, str], str](), set[bool]()
    several = len({job.variant for job in jobs}) > 1
    ours = config.hydra.runtime.choices["hydra/launcher"] == "processes"
    decides_here = ours or torch.cuda.is_available()
    for job, cfg in found:
        # The key holds all other settings, including those that do not change the result, so that
        # a wrong value of any is found.
        decides = cfg.compile == "auto" and torch.cuda.is_available()  # by the budget
        whether = cfg.optim.matrices, cfg.budget.accuracy is None, decides and cfg.budget
        key = repr((asdict(cfg) | dict.fromkeys(NOT_CHECKED), whether, limit_validation(cfg)))
        with refuse(job):
            check(cfg)
            if (cfg.trainer.devices, cfg.trainer.num_nodes) != (1, 1):
                raise ConfigError(
                    "trainer.devices",
                    "a sweep trains each run in one process; use trainer=cpu or trainer=gpu, or "
                    "start the runs one by one",
                )
            if key not in checks:
                try:
                    if cfg.checks:
                        check_layers(cfg)
                    prepared = preflight(cfg, shapes_only=True)
                    checks[key] = prepared.cfg, prepared.bytes_on_disk, prepared.provenance
                except UserError as error:
                    checks[key] = error
            if isinstance(result := checks[key], UserError):
                raise result
            checked, size, provenance = result
            decided |= {checked.compile} if cfg.compile == "auto" else set()
            checked = replace(checked, **{name: getattr(cfg, name) for name in NOT_CHECKED})
            # The first of equal runs stays. A variant can equal a default, such as position=rope in
            # Llama's block, and a value can equal what `auto` chooses, if that is decided here.
            node, typed = asdict(checked if decides_here else cfg), settings_key(asdict(cfg))
            same = settings_key(node), repr(typed_paths(flat(node)))
            if same in first and (several or first[same] != typed):
                continue
            first[same] = typed
            name = name_run(cfg, [o for o in job.overrides if o not in shared])
            plans.append(Plan(job.overrides, checked, home / name, size, provenance))
    for error, those in errors.values():
        if not plans:
            raise error
        own = set.intersection(*(set(job.overrides) for job in those)) - shared
        refused[" ".join(o for o in those[0].overrides if o in own)] = error
    if config.compile == "auto" and decided:  # for all stages: all compile if the longest does
        config.compile = True in decided
        return plans if len(decided) == 1 else plan_jobs(loader, config, refused, jobs, home)
    return plans


@dataclass(frozen=True)
class ExistingRuns:
    """Runs that the sweep's folder already has for some plans, by the plans' folders."""

    done: dict[Path, Path]  # -> finished run that makes the plan unnecessary
    begun: dict[Path, Path]  # -> unfinished run that can be resumed
    diverged: set[Path]  # an equal run has diverged
    stale: dict[Path, tuple[Path, str]]  # -> run of another provenance, and the difference


def find_runs(plans: Sequence[Plan]) -> ExistingRuns:
    """Find the runs of these plans: same settings and, unless `sweep.keep_stale`, same provenance.

    An extended run counts with its first budget if that was completed. An unfinished run with a
    checkpoint is resumed, unless it would fail again.
    """
    found = ExistingRuns({}, {}, set(), {})
    indexes = {home: _index_by_settings(home) for home in {plan.folder.parent for plan in plans}}
    for plan in plans:
        if plan.cfg.sweep.fresh:
            continue
        begun = stale = None
        same = indexes[plan.folder.parent].get(settings_key(asdict(plan.cfg)), [])
        for run in same:
            provenance = run.read_provenance()
            provenance = provenance and provenance.at_first_budget()
            why = ", ".join(differences(provenance, plan.provenance))
            if why and typed_paths(flat(run.read_settings())) != typed_paths(
                flat(asdict(plan.cfg))
            ):
                continue  # the command names other files, so the run is neither done nor stale
            failure = (run.read_failure() or {}).get("exit")
            if why and not plan.cfg.sweep.keep_stale:
                if run.done or run.known_checkpoints():
                    stale = stale or (run.path, why)
            elif run.done:
                found.done[plan.folder] = run.path
                break
            elif failure == DIVERGED:
                found.diverged.add(plan.folder)
            elif (
                failure not in FINAL_EXIT_CODES
                and run.known_checkpoints()
                and run.path not in found.begun.values()
            ):
                begun = begun or run.path
        else:
            if begun is not None:
                found.begun[plan.folder] = begun
            elif stale is not None:
                found.stale[plan.folder] = stale
    return found


def _index_by_settings(home: Path) -> dict[str, list[RunFolder]]:
    """Return `settings_key` -> the runs below `home`, finished ones first, then the newest.

    The key of an extended run is that of its first budget.
    """
    runs: dict[str, list[RunFolder]] = {}
    for run in sorted(find_begun(home), key=lambda run: not run.done):
        if run.done and run.finished_summary() is None:
            continue
        try:
            recorded = run.read_provenance()
            if recorded and recorded.budgets and not run.done:
                continue  # it was stopped while being extended
            key = settings_key(run.read_settings(), *(recorded.budgets[:1] if recorded else ()))
            runs.setdefault(key, []).append(run)
        except DAMAGE:
            continue  # an incomplete record does not count, so the run starts again
    return runs
