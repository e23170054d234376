"""`python scripts/tune.py --variants mha,gqa,mqa`: finds each variant's best learning rate."""

import sys

from gptattn.cli.commands.tune import main

if __name__ == "__main__":
    sys.exit(main())
