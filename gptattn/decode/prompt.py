"""The prompt of a command, from its arguments, a file or stdin."""

import sys
from pathlib import Path

from gptattn.errors import ConfigError, DataError


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """Return the text of prompt=... or prompt_file=...; `-` as the prompt reads stdin.

    Raises ConfigError for neither or both, DataError for a text that is empty or cannot be read.
    """
    if (prompt is None) == (prompt_file is None):
        raise ConfigError("prompt", "give prompt=... or prompt_file=..., exactly one")
    try:
        if prompt_file is not None:
            prompt = prompt_file.read_bytes().decode()
        elif prompt == "-":
            prompt = sys.stdin.buffer.read().decode()
    except (OSError, UnicodeDecodeError) as error:
        field = "prompt" if prompt_file is None else "prompt_file"
        raise DataError(field, f"cannot be read ({error}); give UTF-8 text") from None
    if not prompt:
        raise DataError("prompt", "is empty; give some text")
    return prompt
