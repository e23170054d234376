"""`python scripts/attention_map.py run=outputs/... prompt=TEXT`: draws attention weights."""

import sys

from gptattn.cli.commands.attention_map import main

if __name__ == "__main__":
    sys.exit(main())
