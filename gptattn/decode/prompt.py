"""The prompt of a command, from its argument or stdin."""

import sys

from gptattn.errors import DataError


def read_prompt(prompt: str) -> str:
    """Return the text of prompt=...; `-` reads stdin.

    Raises DataError for a text that is empty or cannot be read.
    """
    if prompt == "-":
        try:
            prompt = sys.stdin.buffer.read().decode()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError("prompt", f"cannot be read ({error}); give UTF-8 text") from None
    if not prompt:
        raise DataError("prompt", "is empty; give some text")
    return prompt
