"""What ends a run: a terminal that closes, with and without nohup, and errors in one's own code."""

import importlib
import shlex
import signal
import subprocess
import sys

import pytest
from support import process_state

from gptattn.errors import ForeignError
from gptattn.machine.ending import as_user_error, handled_signals


def test_a_closed_terminal_ends_a_run_but_not_one_under_nohup():
    with process_state():
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert handled_signals() == [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert handled_signals() == [signal.SIGINT, signal.SIGTERM]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import torch\ntorch.zeros(2) @ torch.zeros(3)\n", "mine.py:2: RuntimeError: "),
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


def test_a_file_does_not_get_what_is_written_to_closed_streams(tmp_path):
    code = (
        "import os, subprocess, sys\n"
        "from gptattn.machine.ending import run_command\n"
        "def run():\n"
        "    print('said')\n"
        "    with open('file', 'wb', buffering=0) as file:\n"
        "        os.write(1, b'to stdout'), os.write(2, b'to stderr'), file.write(b'kept')\n"
        "    assert sys.stdin.read() == ''\n"
        "    subprocess.run([sys.executable, '-c', 'import sys; sys.stdout.flush()'], check=True)\n"
        "raise SystemExit(run_command(run))\n"
    )
    words = [sys.executable, "-c", code]
    closed = f"{shlex.join(words)} <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", closed], cwd=tmp_path).returncode == 0
    assert (tmp_path / "file").read_bytes() == b"kept"
