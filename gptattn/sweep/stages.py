"""What a sweep's loop and its generators of stages hand each other."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gptattn.errors import ConfigError
from gptattn.machine.cpus import usable_cpus
from gptattn.settings.config import TrainConfig
from gptattn.sweep.jobs import Jobs
from gptattn.sweep.plan import Plan

# Work of a training step, parameters of the blocks times tokens, up to which one core does it about
# as fast as several: those of model=nano and smaller with their default batch.
SMALL_STEP = 2e10


@dataclass
class Stage:
    """Runs to launch, and what they are for. `counts`: they are results of the sweep."""

    plans: list[Plan]  # checked
    title: str = ""
    counts: bool = True
    lines: list[str] = field(default_factory=list)  # what led to them, to print before


@dataclass
class Results:
    """How the runs of a stage ended, by the folders of their plans."""

    done: dict[Path, Path] = field(default_factory=dict)  # plan's folder -> that of its result
    failed: dict[Path, str] = field(default_factory=dict)  # plan's folder -> why
    diverged: set[Path] = field(default_factory=set)


# They return the exit codes of what could not be run for lack of a result.
Stages = Generator[Stage, Results, list[int]]
Among = Callable[[list[Plan]], list[Plan]]  # which of some plans run
PlanJobs = Callable[[Jobs], list[Plan]]  # composes, names and checks the runs of some jobs


def share_machine(cfgs: Sequence[TrainConfig]) -> tuple[int, int | None]:
    """Return how many of these runs run at once, and the threads of each; None: as they are set.

    Models whose step is small get a core each; others have all cores, one after the other. Raises
    ConfigError if there are fewer cores than `sweep.jobs` needs.
    """
    from gptattn.machine.device import resolve_device

    cfg, cores = cfgs[0], usable_cpus()
    asked = None if cfg.sweep.jobs == "auto" else cfg.sweep.jobs
    threads = cfg.trainer.threads
    if resolve_device(cfg.trainer.accelerator).type != "cpu":
        return int(asked or 1), None
    most = max(1, cores // (threads or 1))
    if asked is not None and int(asked) > most:
        needs = f" with {threads} threads each" if threads else ""
        raise ConfigError(
            "sweep.jobs", f"{asked} runs at once{needs} are too many here; give at most {most}"
        )
    work = max(
        12 * c.model.num_layers * c.model.d_model**2
        * (c.batch_size // c.accumulate) * c.model.context_length
        for c in cfgs
    )  # fmt: skip
    jobs = asked or (most if threads or work <= SMALL_STEP else 1)
    jobs = min(int(jobs), len(cfgs))
    return jobs, None if threads or jobs == 1 else max(1, cores // jobs)
