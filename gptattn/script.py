"""What the scripts share: help, `--debug`, and one line for a mistake."""

import os
import sys
from collections.abc import Callable, Sequence

from gptattn.cli import report


def run_script(help: str, run: Callable[[Sequence[str]], None]) -> int:
    """Run with the command line's arguments; return the exit code. Without any, print the help."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(help, end="")
        return 0 if arguments else 2
    try:
        run(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read the output has gone, `head` for one; Python would complain as it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        return report(error, debug="--debug" in sys.argv)
    return 0
