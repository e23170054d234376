"""The processes that train one run together, each on rows of its own, and what they agree on."""

import contextlib
import datetime
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from gptattn.machine.place import Place, as_torchrun

T = TypeVar("T")

MEETING = datetime.timedelta(minutes=10)  # for all processes to be there
# A process may wait long for another, which reads a text or writes a sample: a hang is for the
# watchdog to find. A process that has died is noticed at once: its connections close.
PATIENCE = datetime.timedelta(days=1)
# For the first process to say how the run ended. After a loss it may be the one that has died.
PARTING = datetime.timedelta(seconds=20)
PARTING_LOST = datetime.timedelta(seconds=2)
ENDED, FAULT = "ended", "fault"  # keys in the store: the exit codes
LOST = ("gloo", "Connection closed by peer", "Connection reset by peer", "NCCL", "Broken pipe")


class Elsewhere(SystemExit):
    """Another process of the run has failed, and says why; this one only ends."""


class World:
    """The processes of a run. With one process, each method returns what it is given.

    All of them call the same methods in the same order.
    """

    def __init__(self, place: Place, store: Store | None = None) -> None:
        self.place, self.store = place, store
        self.speaks = False  # what ends the run has happened here first, and is to be said here
        self.lost = False  # another process has gone

    @property
    def size(self) -> int:
        """The number of processes."""
        return self.place.size

    @property
    def first(self) -> bool:
        """Whether this process writes the record and talks to the user."""
        return self.place.first

    def of_first(self, value: T) -> T:
        """Return the value that the first process gives."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def most(self, value: float) -> float:
        """Return the largest of the processes' values."""
        return self._reduced([value], dist.ReduceOp.MAX)[0] if self.size > 1 else value

    def total(self, *values: float) -> list[float]:
        """Return the sum of each value over the processes."""
        return self._reduced([*values], dist.ReduceOp.SUM) if self.size > 1 else [*values]

    def _reduced(self, values: list[float], how: dist.ReduceOp.RedOpType) -> list[float]:
        found = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(found, how)
        return found.tolist()

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of the processes' tensors, on their device."""
        if self.size == 1:
            return value
        found = value.clone()
        dist.all_reduce(found)
        return found / self.size

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum of the processes' tensors, on their device."""
        if self.size == 1:
            return value
        found = value.clone()
        dist.all_reduce(found)
        return found

    def together(self, work: Callable[[], T]) -> T:
        """Do the work on each process, on one of each machine first, which leaves a cache behind.

        If it fails on any, all end: the first one on which it failed with its error, the others
        with Elsewhere.
        """
        if self.size == 1:
            return work()
        done: list[T] = []
        for leads in (True, False):
            error = None
            if (self.place.local_rank == 0) == leads:
                try:
                    done.append(work())
                except Exception as caught:
                    error = caught
            self._end_if_any(error)
        return done[0]

    def _end_if_any(self, error: Exception | None) -> None:
        codes: list[int | None] = [None] * self.size
        code = None if error is None else getattr(error, "exit_code", 1)
        dist.all_gather_object(codes, code)
        failed = [rank for rank, found in enumerate(codes) if found is not None]
        if failed and failed[0] == self.place.rank:
            assert error is not None
            self.speaks = True
            raise error
        if failed:
            raise Elsewhere(codes[failed[0]])

    def part(self, rows: int) -> slice:
        """Return the rows of this process among `rows`: the processes' parts follow each other."""
        return slice(rows * self.place.rank // self.size, rows * (self.place.rank + 1) // self.size)


ALONE = World(Place())
_joined: list[World] = []  # the world of this process; torch has one for each process too


def join(place: Place, device: torch.device) -> World:
    """Meet the other processes of the run; call `leave` at the end."""
    if place.size == 1:
        return ALONE
    if device.type == "cuda":
        torch.cuda.set_device(place.local_rank)
    store = _met(place, MEETING)
    _joined[:] = [World(place, store)]  # from here on, another process may be lost
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore("gptattn", store),
        rank=place.rank,
        world_size=place.size,
        timeout=PATIENCE,
    )
    return _joined[0]


def _met(place: Place, timeout: datetime.timedelta) -> Store:
    as_torchrun(place)
    store, _, _ = next(rendezvous("env://", place.rank, place.size, timeout=timeout))
    return store


def end_early(place: Place, code: int | None = None) -> int | None:
    """Before `join`, let the first process say to the others that the run has ended, with `code`.

    Returns the code in the others; None if it says nothing.
    """
    with contextlib.suppress(RuntimeError):
        store = _met(place, PARTING)
        if place.first:
            store.set(ENDED, str(code))
        else:
            store.wait([ENDED], PARTING)
        return int(store.get(ENDED))
    return None


def joined() -> bool:
    """Whether this process has met the others."""
    return bool(_joined)


def is_lost(error: BaseException) -> bool:
    """Whether the error says that the connection to another process has broken."""
    told = isinstance(error, RuntimeError) and any(words in str(error) for words in LOST)
    if not _joined or not (told or isinstance(error, dist.DistError)):
        return False
    _joined[0].lost = True
    return True


def speaks() -> bool:
    """Whether what ends the run has happened in this process first, for it to say."""
    return bool(_joined) and _joined[0].speaks


def fault() -> int | None:
    """Return the exit code of a process that has failed by itself and said so; None without one."""
    with contextlib.suppress(RuntimeError):
        if _joined and (store := _joined[0].store) is not None and store.check([FAULT]):
            return int(store.get(FAULT))
    return None


def leave(code: int, *, own: bool = False) -> int:
    """End this process's part in the run, and return its exit code.

    A process that fails lets the first one speak before it ends, since a launcher ends all others
    when one has ended. `own`: it has failed by itself and has said so.
    """
    if not _joined:
        return code
    world = _joined.pop()
    assert world.store is not None
    with contextlib.suppress(RuntimeError):  # the store may be gone with its process
        if own:
            world.store.set(FAULT, str(code))
        if world.first:
            world.store.set(ENDED, str(code))
        elif code != 0 and not own:
            # NCCL would wait for a process that has died.
            if dist.is_initialized() and dist.get_backend() == "gloo":
                dist.destroy_process_group()
            world.store.wait([ENDED], PARTING_LOST if world.lost else PARTING)
            code = int(world.store.get(ENDED)) or code
    if code == 0:
        dist.destroy_process_group()
    return code
