"""What the commands share: help, and one line for a user's mistake."""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from gptattn.machine.ending import ended


def run_script(help: str, run: Callable[[Sequence[str]], None]) -> int:
    """Run with the command line's arguments; return the exit code. Without any, print the help.

    COMMAND in the help is replaced by the command as the user called it.
    """
    program, *arguments = sys.argv
    if not arguments or arguments[0] in ("-h", "--help"):
        called = f"python {program}" if program.endswith(".py") else Path(program).name
        text = help.replace("COMMAND", called)
        return ended(lambda: print(text, end="")) or (0 if arguments else 2)
    return ended(lambda: run(arguments), os.environ.get("HYDRA_FULL_ERROR") == "1")
