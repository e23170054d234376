"""A sweep's processes: a failure does not stop other runs, and the ledger records everything."""

import contextlib
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from support import ledger_lines

from gptattn.errors import RunFolderError
from gptattn.runs.folder import RunFolder
from gptattn.runs.rows import share_done
from gptattn.runs.sweep_states import LEDGER, read_ledger
from gptattn.sweep.fork_server import LIBRARIES, Copy, ForkServer
from gptattn.sweep.ledger import Ledger
from gptattn.sweep.processes import Outcome, TimeOver, Work, run_all

DONE = "from pathlib import Path; Path('summary.json').write_text('{}')"


class Silent:
    """A watcher that shows nothing and calls `on_poll` while runs are active."""

    def __init__(self, on_poll: Callable[[], None] = lambda: None) -> None:
        self.on_poll = on_poll

    def started(self, work: Work) -> None: ...

    def running(self, works: Sequence[Work]) -> None:
        self.on_poll()

    def ended(self, work: Work, outcome: Outcome) -> None: ...


def work(folder: Path, name: str, code: str) -> Work:
    """Return a work that runs this Python code in its run folder."""
    here = f"import os; os.chdir({str(folder / name)!r})\n"
    return Work(folder / name, [sys.executable, "-m", "run_code", here + code], ["seed=1"], 1.0)


@pytest.fixture(scope="module", autouse=True)
def forks() -> Iterator[ForkServer]:
    # Commands of these tests are to find run_code, and need no library.
    tests = str(Path(__file__).parents[1])
    with mock.patch.dict(os.environ, PYTHONPATH=tests), ForkServer([]) as server:
        yield server


@pytest.fixture(params=["new", "copied"])
def server(request: pytest.FixtureRequest, forks: ForkServer) -> ForkServer | None:
    """What starts the processes; None: each is a new one."""
    return forks if request.param == "copied" else None


# Processes

FAILURES = {
    "an exception": ("import json; json.loads('{')", 1, "json.decoder.JSONDecodeError: "),
    "an exit that says all is well": ("raise SystemExit(0)", 0, "ended without a summary.json"),
    "an exit": ("raise SystemExit(1)", 1, "exit code 1"),
    "a kill": ("os.kill(os.getpid(), 9)", -9, "killed by SIGKILL"),
    "not a number": (
        "print('error: train/loss: is nan at step 3'); raise SystemExit(5)",
        5,
        "train/loss: is nan at step 3",
    ),
    "no memory": ("raise MemoryError", 1, "MemoryError"),
    "a full disk": (
        "import sys; print('error: disk: No space left', file=sys.stderr); raise SystemExit(7)",
        7,
        "disk: No space left",
    ),
    "a crash": ("import signal; os.kill(os.getpid(), signal.SIGSEGV)", -11, "killed by SIGSEGV"),
}


@pytest.mark.slow
def test_a_failed_run_stops_no_other_and_the_ledger_says_why(
    tmp_path: Path, server: ForkServer | None
) -> None:
    works = []
    for name, (code, _, _) in FAILURES.items():
        works += [work(tmp_path, name, code), work(tmp_path, f"after {name}", DONE)]
    outcomes = run_all(works, 2, Ledger(tmp_path), Silent(), server=server)
    assert [outcome.folder for outcome in outcomes] == [w.folder for w in works]
    ends = {line["run"]: line for line in ledger_lines(tmp_path) if line["state"] != "running"}
    for outcome in outcomes:
        name = outcome.folder.name
        line = ends[name]
        if name.startswith("after "):
            assert (outcome.done, line["state"], line["exit"]) == (True, "done", 0)
            continue
        _, code, reason = FAILURES[name]
        assert (outcome.done, line["state"], line["exit"]) == (False, "failed", code)
        assert line["reason"].startswith(reason)


def test_a_command_that_cannot_be_started_is_a_failed_run(tmp_path: Path) -> None:
    works = [
        Work(tmp_path / "a", [str(tmp_path / "nothing")], [], 1.0),
        work(tmp_path, "b", DONE),
    ]
    first, second = run_all(works, 1, Ledger(tmp_path), Silent())
    assert "could not be started" in first.reason
    assert second.done


def test_at_most_so_many_run_at_once_and_one_after_the_other_with_one_slot(
    tmp_path: Path, server: ForkServer | None
) -> None:
    works = [work(tmp_path, f"{i}", DONE) for i in range(3)]
    run_all(works, 1, Ledger(tmp_path), Silent(), server=server)
    states = [line["state"] for line in ledger_lines(tmp_path)]
    assert states == ["running", "done"] * 3


def test_two_slots_run_two_at_once(tmp_path: Path, server: ForkServer | None) -> None:
    # Each waits for the other to begin, so one after the other they would never end.
    wait = "from pathlib import Path\nPath('here').touch()\nwhile not Path({!r}).exists(): pass\n"
    works = [
        work(tmp_path, "a", wait.format(str(tmp_path / "b" / "here")) + DONE),
        work(tmp_path, "b", wait.format(str(tmp_path / "a" / "here")) + DONE),
    ]
    assert all(
        outcome.done for outcome in run_all(works, 2, Ledger(tmp_path), Silent(), server=server)
    )


def test_an_interrupt_ends_the_processes_and_is_in_the_ledger(
    tmp_path: Path, server: ForkServer | None
) -> None:
    ready = tmp_path / "a" / "ready"

    def interrupt_once_ready() -> None:
        if ready.exists():
            raise KeyboardInterrupt

    forever = "from pathlib import Path; Path('ready').touch()\nimport signal; signal.pause()"
    works = [work(tmp_path, "a", forever), work(tmp_path, "b", DONE)]
    with pytest.raises(KeyboardInterrupt):
        run_all(works, 1, Ledger(tmp_path), Silent(interrupt_once_ready), server=server)
    lines = ledger_lines(tmp_path)
    assert [(line["run"], line["state"]) for line in lines] == [
        ("a", "running"),
        ("a", "interrupted"),
    ]
    with pytest.raises(ProcessLookupError):
        os.kill(lines[0]["pid"], 0)


def test_when_time_is_over_the_processes_are_stopped_and_none_is_started(
    tmp_path: Path, server: ForkServer | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = tmp_path / "a" / "ready"
    clock = SimpleNamespace(monotonic=lambda: 60.0 if ready.exists() else 0.0)
    monkeypatch.setattr("gptattn.sweep.processes.time", clock)
    forever = "from pathlib import Path; Path('ready').touch()\nimport signal; signal.pause()"
    works = [work(tmp_path, "a", forever), work(tmp_path, "b", DONE)]
    with pytest.raises(TimeOver):
        run_all(works, 1, Ledger(tmp_path), Silent(), until=60.0, server=server)
    states = [(line["run"], line["state"]) for line in ledger_lines(tmp_path)]
    assert states == [("a", "running"), ("a", "interrupted")]
    # Without runs that are left, the time does not matter.
    assert run_all([], 1, Ledger(tmp_path), Silent(), until=0.0, server=server) == []


def test_what_a_run_prints_is_in_its_folder(tmp_path: Path, server: ForkServer | None) -> None:
    run_all(
        [work(tmp_path, "a", "print('hello')\n" + DONE)],
        1,
        Ledger(tmp_path),
        Silent(),
        server=server,
    )
    assert (tmp_path / "a" / "console.log").read_text() == "hello\n"


@pytest.mark.parametrize("libraries", [("torch",), pytest.param(LIBRARIES, marks=pytest.mark.slow)])
def test_copies_have_the_libraries_and_read_all_else_for_themselves(
    libraries: Sequence[str], tmp_path: Path
) -> None:
    said = (
        f"import sys\nprint([m for m in {libraries} if m not in sys.modules])\n"
        "print([m for m in sys.modules if 'gptattn.m' in m])"
    )
    with ForkServer(libraries) as server:
        run_all([work(tmp_path, "a", said)], 1, Ledger(tmp_path), Silent(), server=server)
    assert (tmp_path / "a" / "console.log").read_text() == "[]\n[]\n"


def test_a_sweeps_server_imports_what_there_is() -> None:
    assert ForkServer()._libraries == LIBRARIES
    assert all(map(find_spec, LIBRARIES))


def test_a_signal_reaches_the_group_of_a_copy_as_soon_as_it_is_known(
    tmp_path: Path, forks: ForkServer
) -> None:
    pauses = [sys.executable, "-m", "run_code", "import signal; signal.pause()"]
    for _ in range(20):
        with (tmp_path / "log").open("wb") as log:
            copy = forks.start(pauses, 0, log)
        os.killpg(copy.pid, signal.SIGKILL)
        assert copy.wait(60) == -signal.SIGKILL


def test_a_copy_that_is_killed_before_it_has_started_was_not_started() -> None:
    status, theirs = os.pipe()
    os.write(theirs, b"-9\n")  # its exit code alone
    os.close(theirs)
    with pytest.raises(ConnectionError):
        Copy(status)


def test_when_the_server_dies_its_copies_are_ended_and_others_are_started_without_it(
    tmp_path: Path,
) -> None:
    ready = tmp_path / "a" / "ready"
    forever = "from pathlib import Path; Path('ready').touch()\nimport signal; signal.pause()"
    works = [work(tmp_path, "a", forever), work(tmp_path, "b", DONE)]
    with ForkServer([]) as server:

        def kill_once_ready() -> None:
            if ready.exists():
                server.process.kill()

        first, second = run_all(works, 1, Ledger(tmp_path), Silent(kill_once_ready), server=server)
    assert first.exit == -signal.SIGKILL
    assert second.done
    with contextlib.suppress(ProcessLookupError):  # it is gone
        ending = os.pidfd_open(ledger_lines(tmp_path)[0]["pid"])
        assert select.select([ending], [], [], 60) == ([ending], [], [])
        os.close(ending)


# The ledger


def test_a_second_sweep_in_one_folder_is_refused_and_names_the_first(tmp_path: Path) -> None:
    with (
        Ledger(tmp_path),
        pytest.raises(RunFolderError, match=f"process {os.getpid()} "),
        Ledger(tmp_path),
    ):
        pass
    with Ledger(tmp_path):
        pass


def test_a_disk_that_takes_no_line_stops_nothing_but_is_known(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "gone")
    ledger.note("a", "done")
    assert isinstance(ledger.unwritten, OSError)


def test_a_line_that_was_cut_short_costs_no_other(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.note("a", "running")
    with (tmp_path / LEDGER).open("a") as file:
        file.write('{"time": 1, "run": "b", "sta')
    ledger.note("c", "failed", exit=5)
    assert [line["run"] for line in read_ledger(tmp_path)] == ["a", "c"]
    assert list(read_ledger(tmp_path / "none")) == []


# What is shown


def test_the_share_done_is_the_newest_whole_row(tmp_path: Path) -> None:
    assert share_done(RunFolder(tmp_path)) == 0.0
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"progress/budget": 0.25}\n{"val/loss": 2.0}\n{"progress/bud')
    assert share_done(RunFolder(tmp_path)) == 0.25
