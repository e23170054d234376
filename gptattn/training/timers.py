"""How a step's seconds are measured: on the host as it ends, or on a GPU one step late."""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch


class StepTimer(ABC):
    """Measures the seconds of one step after another. Each is returned once, in their order."""

    @abstractmethod
    def begin(self) -> None:
        """Note that a step's batch is there and its work begins."""

    @abstractmethod
    def end(self, making: float) -> list[float]:
        """Note that the step has ended; return the seconds of the steps that are known by now.

        `making`: the seconds that making its batch took on the host.
        """

    @abstractmethod
    def settle(self) -> list[float]:
        """Return the seconds of the steps not returned yet. What comes before `begin` is no step's.

        May wait for the device.
        """


class HostTimer(StepTimer):
    """Reads the host's clock: right where the host does the work itself, or waits for it."""

    def __init__(self) -> None:
        self._start = 0.0

    def begin(self) -> None:
        self._start = time.perf_counter()

    def end(self, making: float) -> list[float]:
        return [making + time.perf_counter() - self._start]

    def settle(self) -> list[float]:
        return []


class Event(Protocol):
    """What is used of `torch.cuda.Event`."""

    def record(self) -> None: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end_event: Any) -> float: ...  # milliseconds


def _cuda_event() -> Event:
    return torch.cuda.Event(enable_timing=True)


class EventTimer(StepTimer):
    """Measures on a GPU, from the end of one step to the end of the next.

    The host runs ahead of the device, which it would have to wait for to read a step's time at its
    end: so it reads that of the step before, and is at most one step ahead. A batch is made while
    the device works, and only the first one after `settle` adds its seconds.
    """

    def __init__(self, new_event: Callable[[], Event] = _cuda_event) -> None:
        self._new_event = new_event
        self._from: Event | None = None  # where the next step's time begins, if known
        self._settled = True  # no step has ended since
        self._pending: deque[tuple[float, Event, Event]] = deque()

    def begin(self) -> None:
        if self._from is None:
            self._from = self._recorded()

    def end(self, making: float) -> list[float]:
        assert self._from is not None
        end = self._recorded()
        self._pending.append((making if self._settled else 0.0, self._from, end))
        self._from, self._settled = end, False
        return self._read(but=1)

    def settle(self) -> list[float]:
        self._from, self._settled = None, True
        return self._read(but=0)

    def _recorded(self) -> Event:
        event = self._new_event()
        event.record()
        return event

    def _read(self, but: int) -> list[float]:
        """Return the seconds of all pending steps but the newest `but`."""
        seconds = []
        while len(self._pending) > but:
            making, first, last = self._pending.popleft()
            last.synchronize()
            seconds.append(making + first.elapsed_time(last) / 1e3)
        return seconds
