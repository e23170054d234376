"""Where a prompt comes from."""

import sys

from support import refuses

from gptattn.data.text import read_document
from gptattn.decode.prompt import read_prompt


def test_a_prompt_comes_from_an_argument_or_stdin(tmp_path, monkeypatch):
    file, binary = tmp_path / "prompt.txt", tmp_path / "binary"
    file.write_text("π list", encoding="utf-8")
    binary.write_bytes(b"a\xff")
    assert read_prompt("π list") == "π list"
    with file.open() as opened:
        monkeypatch.setattr(sys, "stdin", opened)
        assert read_prompt("-") == "π list"
    with binary.open() as opened, refuses("prompt: UTF-8", 3):
        monkeypatch.setattr(sys, "stdin", opened)
        read_prompt("-")
    with refuses("prompt: empty", 3):
        read_prompt("")
    for both in ((None, None), ("a", file)):
        with refuses("prompt: prompt_file=FILE"):
            read_prompt(*both)


def test_a_prompt_saved_on_windows_is_read_as_training_reads_it(tmp_path, monkeypatch):
    file = tmp_path / "p.txt"
    file.write_bytes(b"\xef\xbb\xbfThe quick\r\nbrown")
    (text,) = read_document(file)
    assert read_prompt(None, file) == text == "The quick\nbrown"
    with file.open() as opened:
        monkeypatch.setattr(sys, "stdin", opened)
        assert read_prompt("-") == text
