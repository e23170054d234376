"""Which of a run's processes this one is, as torchrun or srun tell it in the environment."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# Of a job step, which srun alone starts: a batch script's own process has SLURM_NTASKS too.
SRUN = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_NUM_NODES")
FIRST_PORT = 15_000  # of those that the number of a SLURM job chooses from


class Elsewhere(SystemExit):
    """Another process of the run has failed, and says why; this one only ends."""


@dataclass(frozen=True)
class Place:
    """Process `rank` of `size`, the `local_rank`-th of `local_size` on its machine, from 0."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launched: bool = False  # by torchrun or srun

    @property
    def first(self) -> bool:
        """Whether this process writes the run's record, and speaks for all of them."""
        return self.rank == 0

    @property
    def nodes(self) -> int:
        """The number of machines."""
        return self.size // self.local_size


def place_here() -> Place:
    """Return this process's place; that of a process alone where no launcher has started it."""
    found = _numbers(os.environ, TORCHRUN)
    if found is not None:
        rank, size, local_rank, local_size = found
        return Place(rank, size, local_rank, local_size, launched=True)
    found = _numbers(os.environ, SRUN)
    if found is None or found[1] == 1:
        return Place()
    rank, size, local_rank, nodes = found
    most = -(-size // nodes)  # srun spreads them evenly, as far as that goes
    return Place(rank, size, local_rank, most, launched=True)


def _numbers(environment: Mapping[str, str], names: tuple[str, ...]) -> list[int] | None:
    values = [environment.get(name, "") for name in names]
    return [int(value) for value in values] if all(map(str.isdecimal, values)) else None


def as_torchrun(place: Place) -> None:
    """Set the variables that torchrun would have set, where srun has started the processes.

    They meet on the first machine of the job, at a port that its number chooses. MASTER_ADDR and
    MASTER_PORT of the user's own come first.
    """
    numbers = (place.rank, place.size, place.local_rank, place.local_size)
    os.environ.update(zip(TORCHRUN, map(str, numbers), strict=True))
    os.environ.setdefault("GROUP_RANK", os.environ.get("SLURM_NODEID", "0"))
    nodes = os.environ.get("SLURM_STEP_NODELIST", "127.0.0.1")
    os.environ.setdefault("MASTER_ADDR", first_node(nodes))
    job = int(os.environ.get("SLURM_JOB_ID", "0")) + int(os.environ.get("SLURM_STEP_ID", "0"))
    os.environ.setdefault("MASTER_PORT", str(FIRST_PORT + job % 10_000))


def first_node(nodes: str) -> str:
    """Return the first host of a list as SLURM writes it: `gpu[07-09,12],big` gives `gpu07`."""
    found = re.match(r"([^,\[]+)(?:\[(\w+))?", nodes)
    return "".join(filter(None, found.groups())) if found else nodes
