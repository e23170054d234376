"""The processes that train one run together, each on rows of its own, and what they agree on."""

import contextlib
import datetime
import os
import time
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from gptattn.errors import ConfigError
from gptattn.machine.place import Elsewhere, Place, as_torchrun

T = TypeVar("T")

MEETING = datetime.timedelta(minutes=10)  # for all processes to be there
# A process may wait long for another, which reads a text or writes a sample: a hang is for the
# watchdog to find. A process that has died is noticed at once: its connections close.
PATIENCE = datetime.timedelta(days=1)
# For the process that speaks to say how the run ended. After a loss it may be what has died.
PARTING = datetime.timedelta(seconds=20)
PARTING_LOST = datetime.timedelta(seconds=2)
LOOK_SECONDS = 0.02  # between two looks at who is there
# Keys in the store: how many are there, how many have failed, and the exit code that was said.
MET, FAILED, ENDED = "met", "failed", "ended"
LOST = ("gloo", "Connection closed by peer", "Connection reset by peer", "NCCL", "Broken pipe")


class World:
    """The processes of a run. With one process, each method returns what it is given.

    All of them call the same methods in the same order.
    """

    def __init__(self, place: Place, store: Store | None = None) -> None:
        self.place, self.store = place, store
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
            raise error
        if failed:
            raise Elsewhere(codes[failed[0]])

    def part(self, rows: int) -> slice:
        """Return the rows of this process among `rows`: the processes' parts follow each other."""
        return slice(rows * self.place.rank // self.size, rows * (self.place.rank + 1) // self.size)


ALONE = World(Place())
_joined: list[World] = []  # the world of this process; torch has one for each process too


def join(place: Place, device: torch.device) -> World:
    """Meet the other processes of the run; call `leave` at the end.

    Raises Elsewhere if one of them has ended instead, and ConfigError if they cannot meet.
    """
    if place.size == 1:
        return ALONE
    if device.type == "cuda":
        torch.cuda.set_device(place.local_rank)
    try:
        store = _met(place, MEETING)
    except dist.DistError as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise ConfigError(
            "trainer.num_nodes",
            f"the {place.size} processes have not met at {where} ({str(error).splitlines()[0]}); "
            "start all of them, with a MASTER_ADDR and MASTER_PORT that each can reach",
        ) from error
    _joined[:] = [World(place, store)]  # from here on, another process may be lost
    _wait_for_all(place, store)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore("gptattn", store),
        rank=place.rank,
        world_size=place.size,
        timeout=PATIENCE,
    )
    return _joined[0]


def _wait_for_all(place: Place, store: Store) -> None:
    """Wait until all are there: to connect, gloo would wait as long as for a number."""
    store.add(MET, 1)
    begun = time.monotonic()
    while store.add(MET, 0) < place.size:
        if store.check([ENDED]):
            raise Elsewhere(int(store.get(ENDED)))
        if time.monotonic() - begun > MEETING.total_seconds():
            raise dist.DistError("the other processes have not come")
        time.sleep(LOOK_SECONDS)


def _met(place: Place, timeout: datetime.timedelta) -> Store:
    as_torchrun(place)
    store, _, _ = next(rendezvous("env://", place.rank, place.size, timeout=timeout))
    return store


def end_early(place: Place, code: int) -> int | None:
    """Before `join`, tell the others that the run has ended, with `code`.

    Any process but the first one waits for it to tell: returns its code, None if it does not.
    """
    with contextlib.suppress(RuntimeError):
        store = _met(place, PARTING)
        if place.first:
            store.set(ENDED, str(code))
            return None
        try:
            store.wait([ENDED], PARTING)
            return int(store.get(ENDED))
        except dist.DistNetworkError:  # it has told, and ended with the store
            return code
        except dist.DistStoreError:
            store.set(ENDED, str(code))
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


def first_to_fail() -> bool:
    """Whether no process has asked this before: the one that says an error which all have."""
    with contextlib.suppress(RuntimeError):  # the store may be gone with its process
        return _store().add(FAILED, 1) == 1
    return False


def told() -> int | None:
    """Return the exit code with which a process says that the run has ended; None if none has."""
    with contextlib.suppress(RuntimeError):
        if _store().check([ENDED]):
            return int(_store().get(ENDED))
    return None


def _store() -> Store:
    store = _joined[0].store
    assert store is not None
    return store


def leave(code: int, *, speaks: bool) -> int:
    """End this process's part in the run, and return its exit code.

    `speaks`: it has said why the run ends. Another one that fails waits for that, since a launcher
    ends all when one has ended.
    """
    if not _joined:
        return code
    store, world = _store(), _joined.pop()
    with contextlib.suppress(RuntimeError):
        if speaks:
            store.set(ENDED, str(code))
        elif code != 0:
            # NCCL would wait for a process that has died.
            if dist.is_initialized() and dist.get_backend() == "gloo":
                dist.destroy_process_group()
            store.wait([ENDED], PARTING_LOST if world.lost else PARTING)
            code = int(store.get(ENDED)) or code
    if code == 0:
        dist.destroy_process_group()
    return code
