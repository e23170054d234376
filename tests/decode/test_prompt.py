"""Prompts out of a file."""

from pathlib import Path

from gptattn.decode.text import read_prompts


def test_only_line_breaks_part_prompts(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes("a\u2028b\x0cc\r\n\n d\x85\n".encode())
    assert read_prompts(file) == ["a\u2028b\x0cc", " d\x85"]
