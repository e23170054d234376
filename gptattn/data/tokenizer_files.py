"""Finds and writes the files of a byte-level BPE, which may come from anywhere."""

from collections.abc import Mapping
from pathlib import Path

from gptattn.machine.disk import write_atomically

# One file, or two; the last form has the names of GPT-2's own release.
FORMS = (("tokenizer.json",), ("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))
FILES = tuple(name for form in FORMS for name in form)
IN_RUN = "tokenizer"  # subfolder of a run folder, and of a prepared text


def find(folder: Path) -> list[Path]:
    """Return the tokenizer's files in `folder` or `folder/tokenizer`; [] if no form is complete."""
    for home in (folder, folder / IN_RUN):
        for form in FORMS:
            if all((home / name).is_file() for name in form):
                return [home / name for name in form]
    return []


def write(folder: Path, files: Mapping[str, str]) -> None:
    """Write a tokenizer's files, name -> text."""
    for name, text in files.items():
        raw = text.encode()
        write_atomically(folder / name, lambda file, raw=raw: file.write(raw))
