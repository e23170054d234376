"""The data that a sweep's loop and stages exchange, and how runs share the machine."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gptattn.machine.cpus import usable_cpus
from gptattn.settings.config import TrainConfig
from gptattn.sweep.plan import Plan

# Work in a training step (blocks' parameters times tokens) up to which one core is about as fast as
# several, as for model=nano with its default batch. Parameters as in Kaplan et al. 2020,
# arXiv:2001.08361, sec. 2.1.
SMALL_STEP = 2e10


@dataclass
class Stage:
    """Checked plans to launch. `counts`: whether their runs are results of the sweep."""

    plans: list[Plan]
    title: str = ""
    counts: bool = True


# Plan's folder -> its run's folder; None: the run diverged. Plans that failed are left out.
Results = dict[Path, Path | None]
Stages = Generator[Stage, Results, int]  # returns an exit code: 0, or why a stage was left out


def share_machine(cfgs: Sequence[TrainConfig]) -> tuple[int, int | None]:
    """Return how many of these runs run in parallel, and each one's threads; None: as set.

    At most as many as cores allow. Models with a small step get a core each; others run one by one
    on all cores.
    """
    from gptattn.machine.device import resolve_device

    cfg, cores = cfgs[0], usable_cpus()
    requested = None if cfg.sweep.jobs in ("auto", None) else int(cfg.sweep.jobs)
    threads = cfg.trainer.threads
    if resolve_device(cfg.trainer.accelerator).type != "cpu":
        return requested or 1, None
    most = max(1, cores // (threads or 1))
    work = max(
        (12 * one.model.num_layers * one.model.d_model**2)
        * (one.batch_size // one.accumulate)
        * one.model.context_length
        for one in cfgs
    )
    auto = most if threads or work <= SMALL_STEP else 1
    jobs = min(requested or auto, most, len(cfgs))
    return jobs, None if threads or jobs == 1 else max(1, cores // jobs)
