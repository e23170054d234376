"""`python scripts/convert.py from=outputs/... to=gqa`: weights from one attention to another."""

import sys

from gptattn.cli.commands.convert import main

if __name__ == "__main__":
    sys.exit(main())
