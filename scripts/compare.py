"""`python scripts/compare.py outputs/my_sweep`: table, page and plots of the finished runs."""

from gptattn.cli.commands.compare import main

if __name__ == "__main__":
    main()
