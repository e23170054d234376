"""`python scripts/tune.py --variants mha,gqa,mqa`: the best learning rate of each variant."""

import sys

from gptattn.cli.commands.tune import main

if __name__ == "__main__":
    sys.exit(main())
