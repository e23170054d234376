"""Any tokenizer of the library `tokenizers`: Llama's, Qwen's, or the user's own."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from gptattn.data.hub import local_folder, name_errors
from gptattn.data.tokenizer import FOLDER, Ids, Tokenizer, id_type, utf8
from gptattn.errors import ConfigError, DataError

FILE = "tokenizer.json"
PIECE_CHARS = 2**14  # encoded at once, roughly
END_OF_TEXT = "<|endoftext|>"  # of GPT-2 and Qwen
ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")  # Llama 3's, Llama 2's, Gemma's
HIDDEN = "\0"  # before the name of a token that no text may spell
BEFORE_SPACE, NOWHERE = re.compile(r"\S(?= )"), re.compile(r"(?!)")


class HuggingFaceTokenizer(Tokenizer):
    """The tokenizer in a tokenizer.json: `path` is the file, its folder, a run or `hf:owner/name`.

    `end_of_text` names the token between documents; default: the first of ENDS that the file has.
    Special tokens in a text count as text, unless `parse_special`; other added tokens are always
    parsed.
    Raises DataError for an unusable file or another hash, ConfigError for an unknown `end_of_text`.
    """

    def __init__(
        self,
        path: str,
        sha256: str | None = None,
        end_of_text: str | None = None,
        parse_special: bool = False,
    ) -> None:
        self._recorded, self._parse_special = sha256, parse_special
        self._folder = local_folder(path, "tokenizer.path", [FILE]).absolute()
        self._read(self._folder)
        # A text can be cut before a space if no token spans the cut or marks a text's beginning.
        whole, a, b = (self.encode(text, "data").tolist() for text in ("a b", "a", " b"))
        across = any(re.search(rb"\S ", token) for token in self._bytes)
        across |= any(one.rstrip for one in self._library.get_added_tokens_decoder().values())
        self._safe_cut = BEFORE_SPACE if whole == a + b and not across else NOWHERE
        self._end = end_of_text or next((end for end in ENDS if end in self._ids), None)
        self.end_of_text = self._ids.get(self._end or "")
        if self._end and self.end_of_text is None:
            raise ConfigError(
                "tokenizer.end_of_text", f"{self._end!r} is not a token here; give one, or null"
            )

    def _take(self, text: str) -> None:
        self._text, self._sha256 = text, hashlib.sha256(text.encode()).hexdigest()
        node = json.loads(text)
        model, added = node["model"], node.setdefault("added_tokens", [])
        node |= dict.fromkeys(("truncation", "padding", "post_processor"))
        byte_level = '"ByteLevel"' in json.dumps(node | {"model": None})
        model |= {"dropout": None} if "dropout" in model else {}
        text, hidden = json.dumps(node), {}
        finds_any = "merges" not in model or model.get("ignore_merges")  # of the vocabulary
        if finds_any and not self._parse_special:
            hidden = {HIDDEN + one["content"]: one["content"] for one in added if one["special"]}
        for name, token in hidden.items():
            text = text.replace(json.dumps(token), json.dumps(name))
        self._library = library = tokenizers.Tokenizer.from_str(text)
        library.encode_special_tokens = not self._parse_special
        self._ids = {hidden.get(token, token): id for token, id in library.get_vocab().items()}
        self.vocab_size = 1 + max(self._ids.values())
        byte_of = {character: byte for byte, character in enumerate(byte_characters())}
        of_bytes = {t for t in self._ids if byte_of.keys() >= set(t)}
        self._special = self._ids.keys() - of_bytes | {one["content"] for one in added}
        self._bytes = [b""] * self.vocab_size
        for token, id in self._ids.items():
            if byte_level:
                plain = token in self._special
                self._bytes[id] = token.encode() if plain else bytes(byte_of[c] for c in token)
            elif byte := re.fullmatch("<0x([0-9A-F]{2})>", token):
                self._bytes[id] = bytes.fromhex(byte[1])
            else:  # after another token, since a text's first one may lose its space
                pair = library.decoder.decode(["a", token]) if library.decoder else f"a {token}"
                self._bytes[id] = pair[1:].encode()

    def _read(self, folder: Path) -> None:
        file = find_file(folder)
        if file is None:
            raise DataError("tokenizer.path", f"{folder} has no {FILE}; give a folder with one")
        with name_errors(DataError, "tokenizer.path", str(file), "give another"):
            self._take(file.read_text(encoding="utf-8"))
        self._check_hash(str(folder))

    def _check_hash(self, where: str) -> None:
        if self._recorded not in (None, self._sha256):
            wrong = f"{where} has different tokens from those recorded"
            wanted = "give the recorded tokenizer.path=FOLDER, or tokenizer.sha256=null to accept"
            raise DataError("tokenizer.sha256", f"{wrong}; {wanted}")

    def encode(self, text: str, field: str) -> Ids:
        utf8(text, field)
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> Sequence[Ids]:
        with name_errors(
            DataError, "tokenizer.path", "a character without an id", "use another tokenizer"
        ):
            encoded = self._library.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(piece.ids, dtype=id_type(self.vocab_size)) for piece in encoded]

    def cut(self, texts: Iterable[str]) -> Iterator[str]:
        """Yield pieces of at least PIECE_CHARS characters, except the last, cut at _safe_cut.

        A text without a safe place to cut is one piece.
        """
        rest, searched = "", 0
        for text in texts:
            rest += text
            start = 0
            while cut := self._safe_cut.search(rest, max(searched, start + PIECE_CHARS - 1)):
                yield rest[start : cut.end()]
                start = cut.end()
            # Search the last character again, now that its successor is known.
            searched = len(rest) - 1 - start
            rest = rest[start:]
        yield rest

    def to_bytes(self, ids: NDArray[np.integer]) -> bytes:
        return b"".join(self._bytes[id] for id in ids.tolist())

    def byte_lengths(self) -> NDArray[np.int64]:
        return np.array([len(token) for token in self._bytes], dtype=np.int64)

    def settings(self) -> dict[str, Any]:
        own = {"end_of_text": self._end, "parse_special": self._parse_special}
        return {"path": str(self._folder), "sha256": self._sha256, **own}

    def fingerprint(self) -> str:
        return f"hf {self._sha256} {self.end_of_text} {self._parse_special}"

    def files(self) -> dict[str, str]:
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": self._end}
        return {FILE: self._text, "tokenizer_config.json": json.dumps(config, indent=2) + "\n"}


def find_file(path: Path) -> Path | None:
    """Return `path`, or the tokenizer.json in it or in its folder `tokenizer`; None if neither."""
    files = (path, path / FILE, path / FOLDER / FILE)
    return next((file for file in files if file.is_file()), None)


def byte_characters() -> list[str]:
    """Return the character for each byte [256]: the byte's own if printable, else from U+0100 on.

    Source: Radford et al. 2019, `bytes_to_unicode` of their encoder.py.
    """
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printing else chr(next(others)) for byte in range(256)]
