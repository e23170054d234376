"""Checks all runs of a sweep before the first one starts."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from gptattn.errors import ConfigError, RunFolderError, UserError
from gptattn.settings.config import TrainConfig, check
from gptattn.settings.identity import Making
from gptattn.sweep.plan import Plan, naming
from gptattn.sweep.sharing import slots
from gptattn.sweep.stackable import check_stackable
from gptattn.sweep.vectorize import check_vectorize
from gptattn.training.precheck import check_run

# The slow checks of model and data ignore these settings: one check covers all of their values.
NOT_CHECKED = ("seed", "optim", "budget")
# (plan, folder of its weights, perhaps still to be written) -> the runs that start from them.
Follow = Callable[[Plan, Path], list[Plan]]


def checked(
    plans: Sequence[Plan], originals: Mapping[str, TrainConfig] | None = None
) -> list[Plan]:
    """Return the plans with `match` applied, and with their making and size on disk.

    `originals` maps each `init_from` folder that does not exist yet to the settings of the run that
    will write it. Raises a UserError for the first plan that cannot work.
    """
    twice = [folder for folder, n in Counter(plan.folder for plan in plans).items() if n > 1]
    if twice:
        raise ConfigError(
            "hydra.sweep.subdir", f"gives several runs the same folder, {twice[0]}; leave it out"
        )
    # Keep only this of each check: the data and weights of many runs would fill the memory.
    known: dict[str, tuple[TrainConfig, int, Making | None]] = {}
    broken: dict[str, Exception] = {}
    ready = []
    for plan in plans:
        with naming(plan.variant):
            check(plan.cfg)
            _check_alone(plan.cfg)
            check_vectorize(plan.cfg)
        slots(plan.cfg)
        if plan.begun:
            raise RunFolderError(
                "hydra.sweep.subdir", f"{plan.folder} already holds a run; leave it out"
            )
        original = (originals or {}).get(plan.cfg.init_from or "")
        # The key holds all other settings, also those without influence on the result: a wrong
        # value of any must be found.
        not_checked = (*NOT_CHECKED, "init_from") if original else NOT_CHECKED
        matrices = {"optim": plan.cfg.optim.matrices}
        key = repr(asdict(plan.cfg) | dict.fromkeys(not_checked) | matrices)
        if key not in known:
            try:
                with naming(plan.variant):
                    made = check_run(plan.cfg, original)
                    if plan.cfg.sweep.vectorize is not None:
                        check_stackable(made.cfg)
                known[key] = made.cfg, made.bytes_on_disk, made.making
            except UserError:
                raise
            except Exception as error:
                # The variant's code fails, not a setting: let its own runs fail, and no others.
                broken[key], known[key] = error, (plan.cfg, 0, None)
        own = {name: getattr(plan.cfg, name) for name in (*NOT_CHECKED, "init_from")}
        cfg, size, making = known[key]
        cfg = replace(cfg, **own)
        ready.append(replace(plan, cfg=cfg, bytes_on_disk=size, making=making))
    if broken and broken.keys() == known.keys():
        raise next(iter(broken.values()))  # nothing can run
    return ready


def _check_alone(cfg: TrainConfig) -> None:
    """Raise ConfigError for runs of several processes: a sweep would start too many at a time."""
    if (cfg.trainer.devices, cfg.trainer.num_nodes) != (1, 1):
        raise ConfigError(
            "trainer.devices",
            "a sweep trains each run in one process; use trainer=cpu or trainer=gpu, or start the "
            "runs one by one",
        )


def check_shared(plans: Sequence[Plan], in_processes: bool) -> None:
    """Raise ConfigError for runs that one machine cannot take over from another."""
    cfgs = [plan.cfg for plan in plans]
    for refused, why in (
        (not in_processes, "needs launcher=processes; leave one of them out"),
        (cfgs[0].sweep.vectorize, "takes single runs; leave sweep.vectorize out"),
        (
            not all(cfg.checkpoint for cfg in cfgs),
            "needs checkpoints, from which another machine goes on; leave checkpoint=false out",
        ),
    ):
        if refused:
            raise ConfigError("sweep.shared", why)


def followers(first: Sequence[Plan], made: Mapping[Path, Path], follow: Follow) -> list[Plan]:
    """Return the checked plans of the second stage.

    `made` maps a first-stage plan's folder to its finished run, whose weights the check then reads.
    For the other plans the check uses their settings. Raises as `checked` does.
    """
    later: list[Plan] = []
    originals: dict[str, TrainConfig] = {}
    for plan in first:
        home = made.get(plan.folder, plan.folder)
        later += follow(plan, home)
        if plan.folder not in made:
            originals[str(home)] = plan.cfg
    return checked(later, originals)
