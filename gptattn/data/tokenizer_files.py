"""Finds, reads, checks and writes the files of a byte-level BPE, which may come from anywhere."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from gptattn.data.tokenizer import MAX_VOCABULARY
from gptattn.errors import DataError
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


def byte_characters() -> list[str]:
    """Return the character for each byte [256]: the byte's own if printable, else from U+0100 on.

    Source: Radford et al. 2019, `bytes_to_unicode` of their encoder.py.
    """
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printing else chr(next(others)) for byte in range(256)]


@dataclass(frozen=True)
class BPE:
    """A vocabulary, written in byte characters, and its merges in the order in which they apply.

    Raises ValueError unless every text has ids and every id has one token: the library accepts ids
    with gaps, ids of two tokens, and vocabularies that lack a byte.
    """

    vocab: dict[str, int]  # to ids 0 .. n - 1
    merges: list[Any]  # pairs of tokens
    added: frozenset[str] = frozenset()  # tokens that tokenizer.json declares as plain text

    def __post_init__(self) -> None:
        if len(self.vocab) > MAX_VOCABULARY:
            raise ValueError(f"it has {len(self.vocab):,} tokens, more than {MAX_VOCABULARY:,}")
        if any(type(id) is not int for id in self.vocab.values()):
            raise ValueError("an id is not a whole number")
        missing = set(range(len(self.vocab))) - set(self.vocab.values())
        if missing:
            raise ValueError(f"its {len(self.vocab):,} tokens have no id {min(missing)}: a gap")
        for byte, character in enumerate(byte_characters()):
            if character not in self.vocab or character in self.added:
                raise ValueError(f"it has no token for byte {byte:#04x}: not a byte-level BPE")
        for number, pair in enumerate(self.merges):
            if len(pair) != 2 or not {*pair, "".join(map(str, pair))} <= self.vocab.keys():
                raise ValueError(
                    f"merge {number}, {str(pair)[:60]}, does not join two known tokens into a "
                    "known one"
                )
        self.token_bytes  # noqa: B018 - fails for half a surrogate pair, which JSON can hold

    @cached_property
    def special(self) -> frozenset[str]:
        """The tokens in plain text instead of byte characters."""
        known = set(byte_characters())
        return self.added | {token for token in self.vocab if not known.issuperset(token)}

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """The bytes of each id."""
        byte_of = {character: byte for byte, character in enumerate(byte_characters())}
        return [
            token.encode() if token in self.special else bytes(byte_of[c] for c in token)
            for token in sorted(self.vocab, key=self.vocab.__getitem__)
        ]


def read_bpe(folder: Path) -> BPE:
    """Return the BPE in `folder`.

    Raises DataError, naming the file, if it is missing, damaged or another kind of tokenizer.
    """
    files = find(folder)
    if not files:
        lacks = f"has no {', no '.join(' with '.join(form) for form in FORMS)}"
        raise DataError(
            "tokenizer.path",
            f"{folder} {lacks if folder.is_dir() else 'is not a folder'}; "
            "give a folder with GPT-2's tokenizer files, or hf:owner/name",
        )
    file = files[0]
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if len(files) == 1:
            return _from_tokenizer_json(content)
        file = files[1]
        lines = [line.split(" ") for line in file.read_text(encoding="utf-8").splitlines() if line]
        if lines and lines[0][0] == "#version:":
            lines = lines[1:]
        return BPE(content, [tuple(pair) for pair in lines])
    # RecursionError: a file of brackets alone is nested too deeply for Python.
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = str(error).splitlines()[0][:200]
        if isinstance(error, KeyError | TypeError | AttributeError):
            reason = f"it has an unexpected structure: {reason}"
        raise DataError("tokenizer.path", f"{file} cannot be used ({reason})") from None


def _from_tokenizer_json(node: Any) -> BPE:
    """Return the BPE. Raises ValueError for another kind than GPT-2's, which gives other ids."""
    model, split = node["model"], node["pre_tokenizer"]
    odd = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    plain = model.get("type", "BPE") == "BPE" and not any(map(model.get, (*odd, "ignore_merges")))
    gpt2s = split["type"] == "ByteLevel" and split["add_prefix_space"] is False
    if not (plain and gpt2s and split.get("use_regex", True)) or node.get("normalizer") is not None:
        raise ValueError("it is not a byte-level BPE like GPT-2's")
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    special = {token["content"]: token["id"] for token in node.get("added_tokens") or []}
    return BPE(model["vocab"] | special, [tuple(pair) for pair in merges], frozenset(special))
