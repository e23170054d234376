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
    if file is None and prompt != "-":
        return prompt or ""
    try:
        return (sys.stdin.buffer.read() if file is None else file.read_bytes()).decode()
    except OSError as error:
        raise DataError(field, f"{file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DataError(
            "prompt" if file is None else field, f"is not UTF-8 at byte {error.start}; give text"
        ) from None
