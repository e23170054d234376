"""`python scripts/recipes.py cache_bytes=1MB context=32768`: which recipes fit, cheapest first."""

import sys

from gptattn.cli.commands.recipes import main

if __name__ == "__main__":
    sys.exit(main())
