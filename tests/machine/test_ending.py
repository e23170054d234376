"""What ends a run: a terminal that closes, with and without nohup, and errors in one's own code."""

import importlib
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from gptattn.errors import ForeignError
from gptattn.machine.ending import as_user_error, handled_signals


@pytest.fixture(autouse=True)
def _hangs_up() -> Iterator[None]:
    before = signal.getsignal(signal.SIGHUP)  # under nohup, it is ignored
    yield
    signal.signal(signal.SIGHUP, before)


def test_a_closed_terminal_ends_a_run_but_not_one_under_nohup():
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    assert handled_signals() == [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert handled_signals() == [signal.SIGINT, signal.SIGTERM]


def test_output_to_a_terminal_that_is_gone_raises_nothing_after_the_signal():
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


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "import torch\ntorch.zeros(2) @ torch.zeros(3)\n",
            "mine.py:2: RuntimeError: inconsistent",
        ),
        ("x = 1\ny = (\n", "mine.py:2: SyntaxError: "),
    ],
)
def test_an_error_in_code_of_ones_own_names_its_file_and_line(text, said, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Exception) as caught:  # noqa: PT011
        importlib.import_module("mine")
    error = as_user_error(caught.value)
    assert isinstance(error, ForeignError)
    assert str(error).startswith(said)
