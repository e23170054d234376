"""Prints the comparison on the terminal: table, words, warnings."""

import sys

from gptattn.compare.results import Comparison
from gptattn.compare.table import cells_table, report_table
from gptattn.compare.verdicts import headline, match_words, section_words, sure_words
from gptattn.compare.wholes import wholes
from gptattn.machine.console import StdoutConsole

MOST = 20  # sentences about single variants that are printed per section


def show(comparison: Comparison) -> None:
    """Print each section's table and verdicts; warnings go to stderr."""
    console = StdoutConsole(highlight=False, markup=False, emoji=False)
    whole = f"{' '.join(comparison.folders)}: {headline(comparison)}"
    if len(comparison.sections) > 1:
        console.print(f"{whole}\n")
    for section in comparison.sections:
        console.print(report_table(section, section.title or whole, console.width))
        *words, last = section_words(section)
        left_out = [f"({len(words) - MOST} more are on the page)"] if len(words) > MOST else []
        for line in [
            *words[:MOST],
            *left_out,
            last,
            *match_words(section)[:MOST],
            *sure_words(section),
        ]:
            console.print(f"- {line}")
        console.print()
    for part in wholes(comparison):
        console.print(cells_table(part.cells, part.title, console.width, part.caption))
        for line in [*part.sentences, *part.notes]:
            console.print(f"- {line}")
        console.print()
    lines = [line for section in comparison.sections for line in section.warnings]
    for line in dict.fromkeys([*lines, *comparison.warnings]):
        print(f"warning: {line}", file=sys.stderr)
