"""`python scripts/convert.py from=outputs/... to=gqa`: converts weights to another attention."""

import sys

from gptattn.cli.commands.convert import main

if __name__ == "__main__":
    sys.exit(main())
