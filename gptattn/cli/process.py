"""One of a run's processes: `python -m gptattn.cli.process OVERRIDES`, started by `launch`."""

from gptattn.cli.main import main

if __name__ == "__main__":
    main()
