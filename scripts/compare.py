"""`python scripts/compare.py outputs/my_sweep`: one table of all finished runs below."""

from gptattn.compare.main import main

if __name__ == "__main__":
    main()
