"""The planned runs of a sweep, and which of them the run folders show as done."""

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
from gptattn.settings.identity import Provenance, differences, flat, places, settings_key
from gptattn.settings.messages import explain_hydra_error, name_typed
from gptattn.sweep.jobs import VARIANTS, Job

DIVERGED = NumericError.exit_code
# Exit codes after which another start would fail alike: settings, data, checkpoint, NaN.
FINAL_EXIT_CODES = (2, 3, 4, DIVERGED)
# Jobs that differ in these numbers alone share a composition, which takes Hydra 0.2 seconds: what
# refers to a number is resolved later, in `from_hydra`.
NUMBERS = re.compile(r"(seed|optim\.lr)=([\d.e+-]+)")
# The slow checks of model and data ignore these settings: one check covers all of their values.
NOT_CHECKED = ("seed", "optim", "budget")


@dataclass(frozen=True)
class Plan:
    """One planned run that has passed its checks, and its folder."""

    overrides: list[str]
    cfg: TrainConfig  # with the match applied
    folder: Path
    bytes_on_disk: int  # expected size of the folder
    provenance: Provenance  # of a run that started now


def plan_jobs(
    loader: ConfigLoader,
    config: DictConfig,
    refused: dict[str, UserError],
    jobs: Sequence[Job],
    home: Path,
) -> list[Plan]:
    """Return the plans of the jobs, ordered by seed first, so that a sweep that is stopped early
    has run every variant.

    `config` is the sweep's. A job that cannot work is left out, and its error is added to
    `refused`, by the overrides that the jobs with this error share, and others lack. Raises the
    first error if no job is left.
    """
    import torch  # it takes seconds, as do the others

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
            known = explain_hydra_error(error, job.overrides, CONF)
            if not isinstance(known, UserError):
                raise
            named = name_typed(known, job.overrides)
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
            if node.compile == "auto":  # an earlier stage may have decided it
                node.compile = config.compile
            found.append((job, from_hydra(node, node.hydra)))
    HydraConfig.instance().cfg = before
    found.sort(key=lambda one: one[1].seed)
    shared = set.intersection(*(set(job.overrides) for job in jobs))  # left out of the names
    # Keep only this of each check: the data and weights of many runs would fill the memory.
    known: dict[str, tuple[TrainConfig, int, Provenance] | UserError] = {}
    plans: list[Plan] = []
    first, decided = dict[tuple[str, str], str](), set[bool]()
    several = len({job.variant for job in jobs}) > 1
    ours = config.hydra.runtime.choices["hydra/launcher"] == "processes"
    decides_here = ours or torch.cuda.is_available()
    for job, cfg in found:
        # The key holds all other settings, also those without influence on the result: a wrong
        # value of any must be found.
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
            if key not in known:
                try:
                    if cfg.checks:
                        check_layers(cfg)
                    ready = preflight(cfg, plans=True)
                    known[key] = ready.cfg, ready.bytes_on_disk, ready.provenance
                except UserError as error:
                    known[key] = error
            if isinstance(made := known[key], UserError):
                raise made
            checked, size, provenance = made
            decided |= {checked.compile} if cfg.compile == "auto" else set()
            checked = replace(checked, **{name: getattr(cfg, name) for name in NOT_CHECKED})
            # The first of equal runs stays: a variant in one block may be the default in another,
            # as position=rope in Llama's, and a value what `auto` comes to, if it is decided here.
            node, typed = asdict(checked if decides_here else cfg), settings_key(asdict(cfg))
            same = settings_key(node), repr(places(flat(node)))
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
    if config.compile == "auto" and decided:  # once, for all stages: all do if the longest does
        config.compile = True in decided
        return plans if len(decided) == 1 else plan_jobs(loader, config, refused, jobs, home)
    return plans


@dataclass(frozen=True)
class ExistingRuns:
    """What the sweep's folder already has for some plans, by their folders."""

    done: dict[Path, Path]  # -> finished run that makes the plan unnecessary
    begun: dict[Path, Path]  # -> unfinished run that can be resumed
    diverged: set[Path]  # of which an equal run has diverged
    stale: dict[Path, tuple[Path, str]]  # -> run of another provenance, and how they differ


def find_runs(plans: Sequence[Plan]) -> ExistingRuns:
    """Find the runs of these plans: same settings and, unless `sweep.keep_stale`, same provenance.

    A run that was extended counts with its first budget, if that was complete.
    An unfinished run is resumed if it has a checkpoint, unless it would fail again.
    """
    found = ExistingRuns({}, {}, set(), {})
    known = {home: _index_by_settings(home) for home in {plan.folder.parent for plan in plans}}
    for plan in plans:
        if plan.cfg.sweep.fresh:
            continue
        begun = stale = None
        same = known[plan.folder.parent].get(settings_key(asdict(plan.cfg)), [])
        for run in same:
            was = run.read_provenance()
            was = was and was.at_first_budget()
            why = ", ".join(differences(was, plan.provenance))
            if why and places(flat(run.read_settings())) != places(flat(asdict(plan.cfg))):
                continue  # the command names other files: neither done nor stale
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
    """Return `settings_key` -> the runs below `home`, those that are done first, then the newest.

    Of a run that was extended, the key is that of its first budget.
    """
    runs: dict[str, list[RunFolder]] = {}
    for run in sorted(find_begun(home), key=lambda run: not run.done):
        if run.done and run.finished() is None:
            continue
        try:
            made = run.read_provenance()
            if made and made.budgets and not run.done:
                continue  # it was stopped while it was extended
            key = settings_key(run.read_settings(), *(made.budgets[:1] if made else ()))
            runs.setdefault(key, []).append(run)
        except DAMAGE:
            continue  # an incomplete record does not count: the run is made again
    return runs
