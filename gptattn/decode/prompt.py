"""The prompt of a command, from its arguments, a file or stdin."""

import sys
from pathlib import Path
from typing import BinaryIO

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
