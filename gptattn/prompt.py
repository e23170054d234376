"""The prompt of a script, from its arguments, a file or stdin."""

import sys
from pathlib import Path

from gptattn.errors import ConfigError, DataError


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """The text of prompt=... or prompt_file=...; `-` as the prompt reads stdin.

    Raises ConfigError for neither or both, DataError for one that is empty or cannot be read.
    """
    if (prompt is None) == (prompt_file is None):
        raise ConfigError("prompt", "give prompt=... or prompt_file=..., one of them")
    try:
        if prompt_file is not None:
            text = prompt_file.read_bytes().decode()
        elif prompt == "-":
            text = sys.stdin.buffer.read().decode()
        else:
            assert prompt is not None
            text = prompt
    except OSError as error:
        raise DataError("prompt_file", f"{prompt_file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DataError("prompt", f"is not UTF-8 at byte {error.start}; give text") from None
    if not text:
        raise DataError("prompt", "is empty; give some text")
    return text
