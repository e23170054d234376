"""`python scripts/evaluate.py run=outputs/...`: a run's loss by position, and by cache."""

import sys

from gptattn.cli.commands.evaluate import main

if __name__ == "__main__":
    sys.exit(main())
