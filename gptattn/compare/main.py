"""`gptattn-compare FOLDER...`: one table of all finished runs below the folders."""

import argparse
import sys
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from gptattn.compare.runs import read_runs
from gptattn.compare.table import markdown_table, terminal_table
from gptattn.errors import UserError


def main() -> NoReturn:
    parser = argparse.ArgumentParser(prog="gptattn-compare", description=__doc__)
    parser.add_argument("folders", nargs="*", type=Path, default=[Path("outputs")])
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    args = parser.parse_args()
    try:
        runs, passed_over = read_runs(args.folders)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    for line in passed_over:
        print(f"passed over: {line}", file=sys.stderr)
    if args.markdown:
        print(markdown_table(runs))
    else:
        console = Console()
        title = " ".join(map(str, args.folders))
        console.print(terminal_table(runs, title, console.width))
    sys.exit(0)
