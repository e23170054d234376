"""What uptraining shows: `python scripts/uptrain_report.py outputs/uptrain`."""

from gptattn.cli.commands.uptrain_report import main

if __name__ == "__main__":
    main()
