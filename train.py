"""Trains a model: `python train.py attn=gqa`. The code is in gptattn/cli/main.py."""

from gptattn.cli.main import main

# Hydra's tab completion in fish works only for a file that contains the text @hydra.main.

if __name__ == "__main__":
    main()
