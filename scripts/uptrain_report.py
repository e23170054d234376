"""What uptraining shows: `python scripts/uptrain_report.py outputs/uptrain`."""

from gptattn.compare.uptrain.main import main

if __name__ == "__main__":
    main()
