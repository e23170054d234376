"""What can go wrong in a sweep, found before its first run starts."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from gptattn.errors import ConfigError, RunFolderError, UserError
from gptattn.settings.config import TrainConfig, check
from gptattn.settings.identity import Making
from gptattn.sweep.plan import Plan, slots
from gptattn.training.precheck import check_run

# What the slow checks of model and data do not look at: they are made once for all of its values.
UNSEEN = ("seed", "optim", "budget")
# The runs that go on from a plan's weights, which lie, or will lie, in the folder.
Follow = Callable[[Plan, Path], list[Plan]]


def checked(
    plans: Sequence[Plan], originals: Mapping[str, TrainConfig] | None = None
) -> list[Plan]:
    """The plans with what `match` makes of them. Raises a UserError for the first that is wrong.

    `originals` has the settings behind each `init_from` that is still to be made.
    """
    twice = [folder for folder, n in Counter(plan.folder for plan in plans).items() if n > 1]
    if twice:
        raise ConfigError(
            "hydra.sweep.subdir", f"gives several runs one folder, {twice[0]}; leave it out"
        )
    # Of what was made only this is kept: of many runs, data and weights would fill the memory.
    known: dict[str, tuple[TrainConfig, int, Making | None]] = {}
    broken: dict[str, Exception] = {}
    ready = []
    for plan in plans:
        check(plan.cfg)
        slots(plan.cfg)
        if plan.begun:
            raise RunFolderError("hydra.sweep.subdir", f"{plan.folder} already holds a run")
        original = (originals or {}).get(plan.cfg.init_from or "")
        # All other settings, not only those that a result depends on: each is to be checked.
        unseen = (*UNSEEN, "init_from") if original else UNSEEN
        key = repr(asdict(plan.cfg) | dict.fromkeys(unseen))
        if key not in known:
            try:
                made = check_run(plan.cfg, original)
                known[key] = made.cfg, made.bytes_on_disk, made.making
            except UserError:
                raise
            except Exception as error:
                # Not a setting but the code of a variant: its own runs will tell, and fail alone.
                broken[key], known[key] = error, (plan.cfg, 0, None)
        own = {name: getattr(plan.cfg, name) for name in (*UNSEEN, "init_from")}
        cfg, size, making = known[key]
        cfg = replace(cfg, **own)
        ready.append(replace(plan, cfg=cfg, bytes_on_disk=size, making=making))
    if broken and broken.keys() == known.keys():
        raise next(iter(broken.values()))  # nothing can run
    return ready


def followers(first: Sequence[Plan], made: Mapping[Path, Path], follow: Follow) -> list[Plan]:
    """The second stage, checked against the weights in `made`, else against their settings."""
    later: list[Plan] = []
    originals: dict[str, TrainConfig] = {}
    for plan in first:
        home = made.get(plan.folder, plan.folder)
        later += follow(plan, home)
        if plan.folder not in made:
            originals[str(home)] = plan.cfg
    return checked(later, originals)
