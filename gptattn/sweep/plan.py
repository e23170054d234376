"""The planned runs of a sweep, and which of them are done, according to the run folders alone."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict

from gptattn.errors import ConfigError, NumericError, UserError
from gptattn.runs.folder import RunFolder, begun_below, done_below, run_name
from gptattn.settings.compose import from_hydra
from gptattn.settings.config import TrainConfig, check
from gptattn.settings.identity import (
    Making,
    at_step,
    differences,
    flat,
    places,
    settings_key,
)

VARIANTS = "hydra.sweeper.variants"
DIVERGED = NumericError.exit_code
# Exit codes after which another start would fail alike: settings, data, checkpoint, NaN.
FINAL_EXIT_CODES = (2, 3, 4, DIVERGED)
# The slow checks of model and data ignore these settings: one check covers all of their values.
NOT_CHECKED = ("seed", "optim", "budget")


@dataclass(frozen=True)
class Plan:
    """One planned run: its overrides, the settings they give, and its folder."""

    overrides: list[str]
    cfg: TrainConfig
    folder: Path
    bytes_on_disk: int = 0  # expected size of the folder; 0: not known yet
    making: Making | None = None  # that the run would have if it started now; None: not known yet
    variant: str = ""  # the entry of hydra.sweeper.variants that it comes from, if any

    @property
    def begun(self) -> bool:
        """Whether its folder already holds a run, which this plan continues."""
        return RunFolder(self.folder).begun


@contextmanager
def naming(variant: str) -> Iterator[None]:
    """In this block, let a user's mistake name the variant that it stands in."""
    try:
        yield
    except UserError as error:
        if not variant:
            raise
        raise type(error)(error.field, f"{error.message}; in {VARIANTS}: {variant}") from error


def plan_jobs(
    loader: ConfigLoader, config: DictConfig, jobs: dict[str, list[list[str]]], home: Path
) -> list[Plan]:
    """Return the plans of the jobs, ordered by seed first, so that a sweep that is stopped early
    has run every variant.

    `config` is the sweep's. Jobs that differ in the seed alone share one composition, which takes
    Hydra a tenth of a second. Raises a UserError for overrides that do not compose.
    """
    everything = [set(job) for some in jobs.values() for job in some]
    shared = set.intersection(*everything)  # left out of the names
    composed: dict[tuple[str, ...], DictConfig] = {}
    plans = []
    before = HydraConfig.instance().cfg
    for variant, some in jobs.items():
        for job in some:
            seeds = [o.partition("=")[2] for o in job if o.startswith("seed=")]
            bare = (
                tuple(o for o in job if not o.startswith("seed=")) if len(seeds) == 1 else (*job,)
            )
            with naming(variant):
                if bare not in composed:
                    composed[bare] = loader.load_sweep_config(config, list(job))
                cfg = deepcopy(composed[bare])
                with open_dict(cfg):
                    cfg.hydra.overrides.task = list(job)
                    if len(seeds) == 1:
                        cfg.seed = seeds[0]
                HydraConfig.instance().set_config(cfg)
                settings = from_hydra(cfg, cfg.hydra)
            name = run_name(settings, [o for o in job if o not in shared])
            plans.append(Plan(list(job), settings, home / name, variant=variant))
    HydraConfig.instance().cfg = before
    in_order = sorted(plans, key=lambda plan: plan.cfg.seed)
    # What is a variant of its own in one block may be another's default: position=rope in Llama's.
    return without_repeats(in_order) if len(jobs) > 1 else in_order


def without_repeats(plans: Sequence[Plan]) -> list[Plan]:
    """Return the plans without those that would make the run of an earlier one again."""
    kept: dict[str, Plan] = {}
    for plan in plans:
        kept.setdefault(settings_key(asdict(plan.cfg)), plan)
    return list(kept.values())


def check_plans(plans: Sequence[Plan]) -> list[Plan]:
    """Return the plans with `match` applied, and with their making and size on disk.

    Raises a UserError for the first plan that cannot work.
    """
    from gptattn.training.preflight import preflight  # torch takes seconds to import

    # Keep only this of each check: the data and weights of many runs would fill the memory.
    known: dict[str, tuple[TrainConfig, int, Making | None]] = {}
    broken: dict[str, Exception] = {}
    ready = []
    for plan in plans:
        cfg = plan.cfg
        # The key holds all other settings, also those without influence on the result: a wrong
        # value of any must be found.
        key = repr(asdict(cfg) | dict.fromkeys(NOT_CHECKED) | {"matrices": cfg.optim.matrices})
        with naming(plan.variant):
            check(cfg)
            if (cfg.trainer.devices, cfg.trainer.num_nodes) != (1, 1):
                raise ConfigError(
                    "trainer.devices",
                    "a sweep trains each run in one process; use trainer=cpu or trainer=gpu, or "
                    "start the runs one by one",
                )
            if key not in known:
                try:
                    made = preflight(cfg)
                    known[key] = made.cfg, made.bytes_on_disk, made.making
                except UserError:
                    raise
                except Exception as error:
                    # The variant's code fails, not a setting: let its own runs fail, no others.
                    broken[key], known[key] = error, (cfg, 0, None)
        checked, size, making = known[key]
        checked = replace(checked, **{name: getattr(cfg, name) for name in NOT_CHECKED})
        ready.append(replace(plan, cfg=checked, bytes_on_disk=size, making=making))
    if broken and broken.keys() == known.keys():
        raise next(iter(broken.values()))  # nothing can run
    twice = [folder for folder, n in Counter(p.folder for p in ready).items() if n > 1]
    assert not twice, "names have a random part"
    return ready


@dataclass(frozen=True)
class Found:
    """What the sweep's folder holds of some plans, by the folders of the plans."""

    done: dict[Path, Path]  # plan folder -> finished run that makes the plan unnecessary
    begun: dict[Path, Path]  # plan folder -> unfinished run that can be resumed
    diverged: set[Path]  # plan folders of which an equal run has diverged
    # Plan folder -> (run with the same settings but another making, how the makings differ).
    stale: dict[Path, tuple[Path, str]]


def find_runs(plans: Sequence[Plan]) -> Found:
    """Find the runs of these plans: same settings, and the same making unless `sweep.keep_stale`.

    A run that was extended counts with its first budget: its schedule was complete when that ended.
    An unfinished one counts if it has a checkpoint, unless it would fail again.
    """
    found = Found({}, {}, set(), {})
    known: dict[Path, dict[str, list[tuple[RunFolder, int | None]]]] = {}
    for plan in plans:
        home, keep_stale = plan.folder.parent, plan.cfg.sweep.keep_stale
        if plan.cfg.sweep.fresh:
            continue
        if home not in known:
            known[home] = _by_settings(home)
        taken = {*found.done.values(), *found.begun.values()}
        for run, until in reversed(known[home].get(settings_key(asdict(plan.cfg)), [])):
            why = _difference(run, plan, until)
            if why and not _same_places(run, plan):
                continue  # the command names other files: neither done nor stale
            failure = (run.read_failure() or {}).get("exit")
            if why and not keep_stale:
                if run.done or run.has_checkpoint:
                    found.stale.setdefault(plan.folder, (run.path, why))
            elif run.done:
                found.done[plan.folder] = run.path
                break
            elif failure == DIVERGED:
                found.diverged.add(plan.folder)
            elif failure not in FINAL_EXIT_CODES and run.has_checkpoint and run.path not in taken:
                found.begun.setdefault(plan.folder, run.path)
        if plan.folder in found.done:
            found.begun.pop(plan.folder, None)
            found.stale.pop(plan.folder, None)
            found.diverged.discard(plan.folder)
        elif plan.folder in found.begun:
            found.stale.pop(plan.folder, None)
    return found


def _by_settings(home: Path) -> dict[str, list[tuple[RunFolder, int | None]]]:
    """Return `settings_key` -> the runs below `home`, unfinished ones first, then by age.

    With each the step where its first budget ended, if it was extended after that.
    """
    runs: dict[str, list[tuple[RunFolder, int | None]]] = {}
    done = done_below(home)
    for run in [*(run for run in begun_below(home) if not run.done), *done]:
        summary = run.finished() or {}
        if run.done and not summary:
            continue
        try:
            settings, until = run.read_settings(), None
            first = (summary.get("completed") or [{}])[0]
            if first and first["step"] < summary["steps"]:
                settings, until = settings | {"budget": first["budget"]}, first["step"]
            runs.setdefault(settings_key(settings), []).append((run, until))
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            continue  # an incomplete record does not count: the run is made again
    return runs


def _difference(run: RunFolder, plan: Plan, until: int | None) -> str:
    """Return how the run's making differs from the plan's; "" if it does not.

    `until` is the last step of the run that counts; None: all of its steps.
    """
    if plan.making is None:
        return "its current code is unknown"
    was = run.read_making()
    was = at_step(was, until) if was and until else was
    return ", ".join(differences(was, plan.making))


def _same_places(run: RunFolder, plan: Plan) -> bool:
    """Whether the run has the same paths of text and weights as the plan."""
    return places(flat(run.read_settings())) == places(flat(asdict(plan.cfg)))
