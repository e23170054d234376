"""`python scripts/prepare.py to=FOLDER data=text data.path=...`: encodes a text for training."""

import sys

from gptattn.cli.commands.prepare import main

if __name__ == "__main__":
    sys.exit(main())
