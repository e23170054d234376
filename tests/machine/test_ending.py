"""What ends a run from outside: the terminal that closes, with and without nohup."""

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from gptattn.machine.ending import handled_signals


@pytest.fixture(autouse=True)
def _hangs_up() -> Iterator[None]:
    before = signal.getsignal(signal.SIGHUP)  # under nohup, it is ignored
    yield
    signal.signal(signal.SIGHUP, before)


def test_a_closed_terminal_ends_a_run_but_not_one_under_nohup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    assert handled_signals() == [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert handled_signals() == [signal.SIGINT, signal.SIGTERM]


def test_output_to_a_terminal_that_is_gone_raises_nothing_after_the_signal() -> None:
    code = (
        "import os\n"
        "from gptattn.machine.ending import write_stderr\n"
        "terminal, ours = os.openpty()\n"
        "os.dup2(ours, 1), os.dup2(ours, 2), os.close(ours), os.close(terminal)\n"
        "write_stderr('hung up')\n"
        "print('a line of progress', flush=True)\n"
        "os._exit(7)\n"
    )
    # In a session of its own: closing the terminal must not hang up the tests.
    ended = subprocess.run([sys.executable, "-c", code], start_new_session=True, check=False)
    assert ended.returncode == 7
