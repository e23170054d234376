"""A text as a model makes it, id by id: what of it can be told already."""

import codecs

import numpy as np

from gptattn.data.tokenizer import Tokenizer


class TextStream:
    """One text as it grows. Holds back half a character, and what may begin the stop text."""

    def __init__(self, tokenizer: Tokenizer, stop: str | None = None) -> None:
        self.told = ""
        self.done = False  # the stop text has come
        self._tokenizer, self._stop = tokenizer, stop
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def feed(self, token: int) -> str:
        """Take one more id; what can be told now, beyond what was."""
        if self.done:
            return ""
        new = self._decoder.decode(self._tokenizer.to_bytes(np.array([token])))
        return self._tell(self._held + new, ended=False)

    def end(self) -> str:
        """What was held back, now that no more comes."""
        if self.done:
            return ""
        return self._tell(self._held + self._decoder.decode(b"", final=True), ended=True)

    def _tell(self, text: str, ended: bool) -> str:
        if self._stop is not None and self._stop in text:
            self.done = True
            text = text[: text.index(self._stop)]
        held = 0 if self.done or ended else self._overlap(text)
        new, self._held = text[: len(text) - held], text[len(text) - held :]
        self.told += new
        return new

    def _overlap(self, text: str) -> int:
        """How many characters at the end of the text may be the beginning of the stop text."""
        stop = self._stop or ""
        longest = min(len(stop) - 1, len(text))
        return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
