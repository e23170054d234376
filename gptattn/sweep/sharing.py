"""How the runs of a sweep share the machine: how many at a time, with how many threads each."""

from dataclasses import dataclass

from gptattn.errors import ConfigError
from gptattn.machine.cpus import usable_cpus
from gptattn.settings.config import TrainConfig


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
    """Whether the sweep may choose how its runs share the machine."""
    on_cpu = cfg.trainer.accelerator != "gpu"
    return cfg.sweep.jobs in ("auto", None) and cfg.trainer.threads is None and on_cpu


def shares(cfg: TrainConfig, runs: int, before: int | None) -> list[Share]:
    """Return the ways in which so many runs can share the machine, the plainest first.

    It is one unless the sweep may choose. `before`: how many ran at a time when it last chose.
    """
    cores = usable_cpus()
    if not is_open(cfg):
        return [Share(slots(cfg), threads_each(cfg))]
    choices = [1, min(cores, runs)] if before is None else [min(cores, before)]
    return [Share(n, cores // n if n > 1 else None) for n in dict.fromkeys(choices)]


def slots(cfg: TrainConfig) -> int:
    """Return how many runs may run at once. Raises ConfigError if the CPU cores do not suffice."""
    jobs, threads = cfg.sweep.jobs, cfg.trainer.threads
    if jobs == "auto":
        jobs = None
    if cfg.trainer.accelerator == "gpu":
        return jobs or 1
    most = max(1, usable_cpus() // (threads or 1))
    if jobs is not None and jobs > most:
        needs = f" with {threads} threads each" if threads else ""
        raise ConfigError(
            "sweep.jobs", f"{jobs} runs at once{needs} are too many here; give at most {most}"
        )
    return jobs or (most if threads else 1)


def threads_each(cfg: TrainConfig) -> int | None:
    """Return the threads of each run if several run at once and the user set none; else None."""
    parallel = slots(cfg)
    if cfg.trainer.threads is not None or parallel == 1:
        return None
    return max(1, usable_cpus() // parallel)
