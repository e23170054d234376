"""`python scripts/check.py attn=mine`: what holds of an attention of one's own."""

from gptattn.cli.commands.check import main

if __name__ == "__main__":
    main()
