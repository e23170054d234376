"""Turns new ids into text as soon as it is certain."""

import codecs

import numpy as np

from gptattn.data.tokenizer import Tokenizer


class TextStream:
    """A growing text. Holds back incomplete characters and any possible start of the stop text."""

    def __init__(self, tokenizer: Tokenizer, stop: str | None = None) -> None:
        self.emitted = ""  # all text returned so far
        self.done = False  # the stop text has appeared
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
        held = 0 if self.done or ended else self._count_overlap(text)
        new, self._held = text[: len(text) - held], text[len(text) - held :]
        self.emitted += new
        return new

    def _count_overlap(self, text: str) -> int:
        """Return how many characters at the end of the text may be the start of the stop text."""
        stop = self._stop or ""
        longest = min(len(stop) - 1, len(text))
        return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
