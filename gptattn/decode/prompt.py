"""Reads a command's prompt from its argument, a file or stdin."""

import io
import sys
from pathlib import Path

from gptattn.data.text import ENCODING
from gptattn.errors import ConfigError, DataError


def read_prompt(prompt: str | None, file: Path | None = None) -> str:
    """Return the text of prompt=... or prompt_file=...; `prompt=-` reads stdin.

    Files and stdin are read as training reads a text. Raises ConfigError if neither or both are
    given, DataError for a text that is empty or cannot be read.
    """
    if (prompt is None) == (file is None):
        raise ConfigError("prompt", "give either prompt=TEXT or prompt_file=FILE")
    if prompt is None or prompt == "-":
        try:
            raw = file.read_bytes() if file else sys.stdin.buffer.read()
            prompt = io.TextIOWrapper(io.BytesIO(raw), encoding=ENCODING).read()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError("prompt", f"cannot be read ({error}); give readable UTF-8") from None
    if not prompt:
        raise DataError("prompt", "is empty; give some text")
    return prompt
