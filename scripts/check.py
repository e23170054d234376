"""`python scripts/check.py attn=mine`: checks an attention of your own."""

from gptattn.cli.commands.check import main

if __name__ == "__main__":
    main()
