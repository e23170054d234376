"""The front door: `python train.py attn=gqa`. All of it is in gptattn/cli/main.py."""

from gptattn.cli.main import main

# Tab in fish completes only a file with @hydra.main in it.

if __name__ == "__main__":
    main()
