"""Text in and out of a model: prompts, and the text of new ids as soon as it is certain."""

import codecs
import sys
from pathlib import Path
from typing import BinaryIO

import numpy as np

from gptattn.data.tokenizer import Tokenizer
from gptattn.errors import ConfigError, DataError

MAX_BYTES = 16_000_000  # of a prompt; a device like /dev/zero has no end


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """Return the text of prompt=... or prompt_file=...; `-` as the prompt reads stdin.

    Raises ConfigError for neither or both, DataError for a text that is empty or cannot be read.
    """
    if (prompt is None) == (prompt_file is None):
        raise ConfigError("prompt", "give prompt=... or prompt_file=..., exactly one")
    text = _read(prompt, prompt_file, "prompt_file")
    if not text:
        raise DataError("prompt", "is empty; give some text")
    return text


def read_prompts(file: Path) -> list[str]:
    """Return the prompts in a file, one per line, without empty lines. Raises as `read_prompt`."""
    # Not splitlines(), which would also split at a form feed or U+2028 within a prompt.
    lines = [line.removesuffix("\r") for line in _read(None, file, "prompts_file").split("\n")]
    lines = [line for line in lines if line]
    if not lines:
        raise DataError("prompts_file", f"{file} is empty; give one prompt per line")
    return lines


def _read(prompt: str | None, file: Path | None, field: str) -> str:
    try:
        if file is not None:
            with file.open("rb") as opened:
                return _read_limited(opened, field).decode()
        if prompt == "-":
            return _read_limited(sys.stdin.buffer, "prompt").decode()
    except OSError as error:
        raise DataError(field, f"{file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DataError(
            "prompt" if file is None else field, f"is not UTF-8 at byte {error.start}; give text"
        ) from None
    return prompt or ""


def _read_limited(file: BinaryIO, field: str) -> bytes:
    raw = file.read(MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        raise DataError(field, f"has more than {MAX_BYTES:,} bytes; give a shorter text")
    return raw


class TextStream:
    """A growing text. Holds back incomplete characters and any possible start of the stop text."""

    def __init__(self, tokenizer: Tokenizer, stop: str | None = None) -> None:
        self.emitted = ""  # all text returned so far
        self.done = False  # the stop text has come
        self._tokenizer, self._stop = tokenizer, stop
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def feed(self, token: int) -> str:
        """Add one id; return the new text that is certain."""
        if self.done:
            return ""
        new = self._decoder.decode(self._tokenizer.to_bytes(np.array([token])))
        return self._emit(self._held + new, ended=False)

    def end(self) -> str:
        """Return what was held back; call it after the last id."""
        if self.done:
            return ""
        return self._emit(self._held + self._decoder.decode(b"", final=True), ended=True)

    def _emit(self, text: str, ended: bool) -> str:
        if self._stop is not None and self._stop in text:
            self.done = True
            text = text[: text.index(self._stop)]
        held = 0 if self.done or ended else self._overlap(text)
        new, self._held = text[: len(text) - held], text[len(text) - held :]
        self.emitted += new
        return new

    def _overlap(self, text: str) -> int:
        """Return how many characters at the end of the text may be the start of the stop text."""
        stop = self._stop or ""
        longest = min(len(stop) - 1, len(text))
        return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
