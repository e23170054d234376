"""`python scripts/generate.py run=outputs/... prompt=TEXT`: text from a trained run, streamed."""

import sys

from gptattn.cli.commands.generate import main

if __name__ == "__main__":
    sys.exit(main())
