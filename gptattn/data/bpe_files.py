"""Reads and checks the files of a byte-level BPE, which may come from anywhere."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from gptattn.data.tokenizer import MAX_VOCABULARY
from gptattn.data.tokenizer_files import FORMS, find
from gptattn.errors import DataError

END_OF_TEXT = "<|endoftext|>"
# Values allowed in tokenizer.json; None is null or missing. Any other value gives other ids.
PLAIN_MODEL = {
    "type": (None, "BPE"),
    "dropout": (None, 0.0),
    "continuing_subword_prefix": (None, ""),
    "end_of_word_suffix": (None, ""),
    "byte_fallback": (None, False),
    "ignore_merges": (None, False),
}
GPT2_SPLIT = {"type": ("ByteLevel",), "add_prefix_space": (False,), "use_regex": (None, True)}


def byte_characters() -> list[str]:
    """Return the character for each byte [256]: the byte's own if printable, else from U+0100 on.

    Source: Radford et al. 2019, `bytes_to_unicode` of their encoder.py.
    """
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printing else chr(next(others)) for byte in range(256)]


@dataclass(frozen=True)
class BPE:
    """A vocabulary, written in byte characters, and its merges in the order in which they apply."""

    vocab: dict[str, int]  # to ids 0 .. n - 1
    merges: list[tuple[str, str]]
    special: frozenset[str]  # tokens of `vocab` that are plain text instead of byte characters

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """The bytes of each id."""
        byte_of = {character: byte for byte, character in enumerate(byte_characters())}
        return [
            token.encode() if token in self.special else bytes(byte_of[c] for c in token)
            for token in sorted(self.vocab, key=self.vocab.__getitem__)
        ]


def read(folder: Path) -> BPE:
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
        if len(files) == 1:
            return _checked(*_from_tokenizer_json(_json(file)))
        vocab, file = _json(file), files[1]
        return _checked(vocab, _merges(_content(file)), {})
    # RecursionError: a file of brackets alone is nested too deeply for Python.
    except (OSError, ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0][:200]
        raise DataError("tokenizer.path", f"{file} cannot be used ({reason})") from None


def of_merges(text: str) -> BPE:
    """Return the BPE of these merges, one per line, with ids in GPT-2's order.

    The bytes come first, then what the merges make, and last the end of text. Raises ValueError for
    what are no merges.
    """
    merges = _merges(text)
    vocab = {character: id for id, character in enumerate(sorted(byte_characters()))}
    for pair in merges:
        vocab.setdefault("".join(pair), len(vocab))  # two pairs can make one token
    return _checked(vocab, merges, {END_OF_TEXT: len(vocab)})


def _merges(text: str) -> list[Any]:
    lines = [line.split(" ") for line in text.split("\n") if line.strip()]
    return lines[1:] if lines and lines[0][0] == "#version:" else lines


def _content(file: Path) -> str:
    return file.read_text(encoding="utf-8").replace("\r\n", "\n")


def _json(file: Path) -> Any:
    return json.loads(_content(file))


def _from_tokenizer_json(node: Any) -> tuple[Any, list[Any], dict[str, Any]]:
    """Return vocabulary, merges, and special tokens with their ids.

    Raises ValueError unless it is GPT-2's kind of BPE.
    """
    model, split, added = (_get(node, key) for key in ("model", "pre_tokenizer", "added_tokens"))
    plain = all(_get(model, key) in allowed for key, allowed in PLAIN_MODEL.items())
    gpt2s = all(_get(split, key) in allowed for key, allowed in GPT2_SPLIT.items())
    if not plain or not gpt2s or _get(node, "normalizer") is not None:
        raise ValueError("it is another tokenizer than GPT-2's byte-level BPE")
    merges = _get(model, "merges")
    if not isinstance(merges, list) or not isinstance(added, list | None):
        raise ValueError("its merges or its added tokens are not a list")
    special = {str(_get(token, "content")): _get(token, "id") for token in added or []}
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
    return _get(model, "vocab"), pairs, special


def _get(node: Any, key: str) -> Any:
    if not isinstance(node, dict):
        raise ValueError("it is not a tokenizer.json object")
    return node.get(key)


def _checked(vocab: Any, merges: list[Any], special: dict[str, Any]) -> BPE:
    """Return the BPE. Raises ValueError unless every text has ids and every id has one token.

    The library accepts ids with gaps, ids of two tokens, and vocabularies that lack a byte.
    """
    if not isinstance(vocab, dict):
        raise ValueError("its vocabulary is not a table of tokens and ids")
    vocab = vocab | special
    if any(type(i) is not int for i in vocab.values()):
        raise ValueError("an id is not a whole number")
    if len(vocab) > MAX_VOCABULARY:
        raise ValueError(f"it has {len(vocab):,} tokens, more than {MAX_VOCABULARY:,}")
    missing = set(range(len(vocab))) - set(vocab.values())
    if missing:
        raise ValueError(f"its {len(vocab):,} tokens have no id {min(missing)}: there is a gap")
    characters = byte_characters()
    for byte, character in enumerate(characters):
        if character not in vocab or character in special:
            raise ValueError(f"it has no token for byte {byte:#04x}, so it is not a byte-level BPE")
    for number, pair in enumerate(merges):
        known = isinstance(pair, list) and len(pair) == 2 and all(type(p) is str for p in pair)
        if not known or any(token not in vocab for token in (*pair, "".join(pair))):
            raise ValueError(
                f"merge {number}, {str(pair)[:60]}, does not join two known tokens into a known one"
            )
    odd = {token for token in vocab if not set(token) <= set(characters)}
    odd |= set(special)
    for token in odd:
        token.encode()  # raises for half a surrogate pair, which JSON can hold
    return BPE(vocab, [(a, b) for a, b in merges], frozenset(odd))
