"""How the runs of a sweep share the machine: how many at a time, with how many threads each."""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gptattn.errors import ConfigError
from gptattn.machine.cpus import usable_cpus
from gptattn.settings.config import TrainConfig
from gptattn.sweep.fork_server import can_fork

BESIDE_OTHERS = "--beside-others"  # the argument of a run's process that others share the machine
MARGIN = 1.05  # for noise: more than one at a time has to be faster by this factor


@dataclass(frozen=True)
class Share:
    """How runs share the machine: so many at a time, with so many threads each; None: as set."""

    jobs: int
    threads: int | None

    def __str__(self) -> str:
        each = "all cores" if self.threads is None else _counted(self.threads, "thread")
        return f"{_counted(self.jobs, 'run')} at a time on {each}{' each' * (self.jobs > 1)}"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def is_open(cfg: TrainConfig) -> bool:
    """Whether the sweep may choose how its runs share the machine: where a trial can measure it.

    It measures single runs on a CPU, not groups of seeds.
    """
    free = _asked(cfg) is None and cfg.trainer.threads is None and cfg.sweep.vectorize is None
    return free and can_fork() and not _on_gpu(cfg)


def shares(cfg: TrainConfig, runs: int, before: int | None) -> list[Share]:
    """Return the ways in which so many runs can share the machine, the plainest first.

    It is one unless the sweep may choose. `before`: how many at a time it has chosen already.
    """
    if not is_open(cfg):
        jobs = slots(cfg)
        return [Share(jobs, threads_each(cfg, jobs))]
    cores = usable_cpus()
    # The last runs of a sweep that is gone on with have as many threads as the others had.
    choices = [1, min(cores, runs)] if before is None else [min(cores, before)]
    return [Share(jobs, threads_each(cfg, jobs)) for jobs in dict.fromkeys(choices)]


def quickest(seconds: Mapping[Share, Sequence[float]]) -> tuple[Share, float]:
    """Return the share with which the runs end first, and how many times as fast as the first one.

    `seconds`: those of each run. The first share is taken unless another is faster by MARGIN.
    """
    spans = {share: time_to_end(each, share.jobs) for share, each in seconds.items()}
    first, best = next(iter(spans)), min(spans, key=spans.__getitem__)
    if spans[first] < MARGIN * spans[best]:
        best = first
    return best, spans[first] / spans[best]


def time_to_end(seconds: Iterable[float], jobs: int) -> float:
    """Return how long runs of these seconds take, so many at a time, the longest first."""
    ends = [0.0] * jobs
    for each in sorted(seconds, reverse=True):
        heapq.heapreplace(ends, ends[0] + each)
    return max(ends)


def choice_for(cfgs: Sequence[TrainConfig]) -> dict[str, Any]:
    """Return what a choice for these runs depends on, in plain values."""
    sizes = work_sizes(asdict(largest(cfgs)))
    return {"runs": len(cfgs), "cores": usable_cpus(), "largest": list(sizes)}


def largest(cfgs: Sequence[TrainConfig]) -> TrainConfig:
    """Return the settings of the largest of the models."""
    return max(cfgs, key=lambda cfg: cfg.model.num_layers * cfg.model.d_model**2)


def work_sizes(settings: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the sizes of a run's steps; without the MLP's width, which `match` changes."""
    model = {key: value for key, value in settings["model"].items() if key != "d_mlp"}
    return model, settings["batch_size"], settings["accumulate"]


def slots(cfg: TrainConfig) -> int:
    """Return how many runs may run at once. Raises ConfigError if the CPU cores do not suffice."""
    jobs, threads = _asked(cfg), cfg.trainer.threads
    if _on_gpu(cfg):
        return jobs or 1
    most = max(1, usable_cpus() // (threads or 1))
    if jobs is not None and jobs > most:
        needs = f" with {threads} threads each" if threads else ""
        raise ConfigError(
            "sweep.jobs", f"{jobs} runs at once{needs} are too many here; give at most {most}"
        )
    return jobs or (most if threads else 1)


def threads_each(cfg: TrainConfig, jobs: int) -> int | None:
    """Return the threads of each of so many runs at once; None: as set, or all cores."""
    if cfg.trainer.threads is not None or jobs == 1:
        return None
    return max(1, usable_cpus() // jobs)


def _asked(cfg: TrainConfig) -> int | None:
    """Return `sweep.jobs` as a number; None for `auto`, which older records have as null."""
    return None if cfg.sweep.jobs == "auto" else cfg.sweep.jobs


def _on_gpu(cfg: TrainConfig) -> bool:
    from gptattn.machine.device import resolve_device  # torch: not while the trial is started

    return resolve_device(cfg.trainer.accelerator).type != "cpu"
