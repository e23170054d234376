"""The front door: `python train.py attn=gqa`. All of it is in gptattn/cli.py."""

from gptattn.cli import main

if __name__ == "__main__":
    main()
