"""How the reporting commands end."""

import sys
from collections.abc import Callable
from typing import NoReturn

from gptattn.compare.finished_runs import one_line
from gptattn.errors import UserError
from gptattn.machine.signals import open_output, reader_gone


def end_with(report: Callable[[], None]) -> NoReturn:
    """Report, then exit with the codes of `gptattn.errors`: a user's mistake is one line."""
    open_output()
    try:
        report()
        sys.stdout.flush()
    except BrokenPipeError:
        sys.exit(reader_gone())
    except UserError as error:
        print(f"error: {one_line(str(error))}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    sys.exit(0)
