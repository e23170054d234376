"""The front door: `python train.py attn=gqa`. All of it is in gptattn/cli.py."""

from gptattn.cli import main

# Tab in fish completes only a file with @hydra.main in it.

if __name__ == "__main__":
    main()
