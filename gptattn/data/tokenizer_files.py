"""Which files a tokenizer may consist of: found and written, in any folder and in a run's."""

from collections.abc import Mapping
from pathlib import Path

from gptattn.machine.disk import write_atomically

# One file, or two; GPT-2's own release named them otherwise.
FORMS = (("tokenizer.json",), ("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))
FILES = tuple(name for form in FORMS for name in form)
IN_RUN = "tokenizer"  # the folder in a run's folder


def find(folder: Path) -> list[Path]:
    """The tokenizer's files in a folder, or in a run's; none where no form of them is whole."""
    for home in (folder, folder / IN_RUN):
        for form in FORMS:
            if all((home / name).is_file() for name in form):
                return [home / name for name in form]
    return []


def write(folder: Path, files: Mapping[str, str], root: Path | None = None) -> None:
    """The files of a tokenizer, name -> text, as they are; `root` as in `disk.make_folder`."""
    for name, text in files.items():
        raw = text.encode()
        write_atomically(folder / name, lambda file, raw=raw: file.write(raw), root)
