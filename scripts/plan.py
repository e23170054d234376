"""`python scripts/plan.py model=gpt2_small`: what training on one or many GPUs would take."""

import sys

from gptattn.cli.commands.plan import main

if __name__ == "__main__":
    sys.exit(main())
