"""The step clock on a GPU, with events of a device whose time is known."""

from types import SimpleNamespace
from typing import Any

import pytest

from gptattn.training.callbacks import StepClock
from gptattn.training.timers import EventTimer


class Device:
    """A device with a queue: its time moves on by what was launched, and by the host's if idle."""

    def __init__(self) -> None:
        self.host, self.free_at = 0.0, 0.0  # seconds; when the device has done all its work
        self.waits: list[float] = []  # of the host, the moments that it waited for

    def launch(self, seconds: float) -> None:
        self.free_at = max(self.host, self.free_at) + seconds

    def event(self) -> "Marker":
        return Marker(self)


class Marker:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.at = 0.0

    def record(self) -> None:
        self.at = max(self.device.host, self.device.free_at)

    def synchronize(self) -> None:
        self.device.waits.append(self.at)
        self.device.host = max(self.device.host, self.at)

    def elapsed_time(self, end_event: "Marker") -> float:
        return 1e3 * (end_event.at - self.at)


class Run:
    """The hooks of a run, in their order, with `StepClock` called as Lightning calls it."""

    def __init__(self, compiled: bool = False) -> None:
        self.device, self.step = Device(), 0
        self.clock = StepClock(compiled, EventTimer(self.device.event))

    def train(self, seconds: float, making: float = 0.0, replayed: bool = False) -> None:
        self.device.host += making
        self.clock.add(making)
        self.clock.on_train_batch_start()
        if not replayed:
            self.device.launch(seconds)
            self.step += 1
        trainer: Any = SimpleNamespace(global_step=self.step)
        self.clock.on_train_batch_end(trainer)

    def validate(self, seconds: float) -> None:
        self.clock.on_validation_start()
        self.device.launch(seconds)
        self.device.host = self.device.free_at


def test_a_step_lasts_from_the_end_of_the_one_before_it_to_its_own() -> None:
    run = Run()
    for seconds in (3.0, 5.0, 7.0, 11.0):
        run.train(seconds, making=0.5)  # hidden behind the device's work, except in the first step
    run.clock.settle()
    assert run.clock.step_seconds.tolist() == [3.5, 5.0, 7.0, 11.0]
    assert run.clock.seconds == 26.5 == run.device.free_at


def test_a_batch_that_the_device_waits_for_counts() -> None:
    run = Run()
    run.train(3.0)
    run.train(2.0, making=13.0)
    run.train(5.0)
    run.clock.settle()
    # The device is free after 3 seconds, gets its work after 13, and is done after 15.
    assert run.clock.step_seconds.tolist() == [3.0, 12.0, 5.0]


def test_the_host_waits_for_no_step_but_the_one_before() -> None:
    run = Run()
    for n in range(1, 5):
        run.train(2.0)
        assert len(run.clock.step_seconds) == n - 1
        assert run.device.waits == [2.0 * i for i in range(1, n)]


def test_validation_and_rows_are_left_out() -> None:
    run = Run()
    run.train(3.0)
    run.validate(100.0)
    run.train(5.0, making=0.25)
    run.clock.settle()  # a row
    run.device.host += 50.0
    run.train(7.0)
    run.validate(100.0)
    assert run.clock.step_seconds.tolist() == [3.0, 5.25, 7.0]


def test_what_is_saved_holds_every_step_and_a_replayed_one_adds_nothing() -> None:
    first = Run()
    for seconds in (3.0, 5.0):
        first.train(seconds)
    saved = first.clock.state_dict()
    assert saved["step_seconds"].tolist() == [3.0, 5.0]
    resumed = Run()
    resumed.step = 2
    resumed.clock.load_state_dict(saved)
    resumed.train(0.0, replayed=True)
    resumed.validate(100.0)
    resumed.train(7.0)
    resumed.clock.settle()
    assert resumed.clock.step_seconds.tolist() == [3.0, 5.0, 7.0]
    assert resumed.clock.seconds == 15.0


@pytest.mark.parametrize("compiled", [False, True])
def test_a_compiled_runs_first_step_is_listed_and_not_counted(compiled: bool) -> None:
    run = Run(compiled)
    for seconds in (60.0, 2.0, 3.0):
        run.train(seconds)
    run.clock.settle()
    assert run.clock.step_seconds.tolist() == [60.0, 2.0, 3.0]
    assert run.clock.seconds == (5.0 if compiled else 65.0)
