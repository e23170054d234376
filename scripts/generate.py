"""`python scripts/generate.py run=outputs/... prompt=TEXT`: streams text from a trained run."""

import sys

from gptattn.cli.commands.generate import main

if __name__ == "__main__":
    sys.exit(main())
