"""`python scripts/new.py mine`: writes a variant of your own that trains at once."""

from gptattn.cli.commands.new import main

if __name__ == "__main__":
    main()
