"""A text of several files: held-out parts, separators, and what is dropped from files."""

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
from support import bpe, rows, summary, train

from gptattn.data.bpe import GPT2Tokenizer
from gptattn.data.text import text
from gptattn.data.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer
from gptattn.data.tokens import TokenData, load_tokens
from gptattn.errors import ConfigError, DataError


def written(folder: Path, files: Mapping[str, str | bytes]) -> str:
    """Write the files into the folder; return its path."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(folder)


def load(
    path: str,
    cache: Path,
    tokenizer: Tokenizer | None = None,
    *,
    val_path: str | None = None,
    fraction: float = 0.1,
) -> TokenData:
    return load_tokens(
        lambda: text(path, val_path=val_path),
        tokenizer or ByteTokenizer(),
        context_length=8,
        val_fraction=fraction,
        cache=cache,
    )


def told(data: TokenData) -> tuple[str, str]:
    """Return the text that is trained on, and the text that is scored."""
    decode = data.tokenizer.decode
    return decode(data.train[:]), decode(data.val[1:])


def test_the_tail_of_each_file_is_held_out_and_files_are_apart(tmp_path: Path) -> None:
    books = written(tmp_path / "books", {"1.txt": "a" * 40, "2.txt": "b" * 60, "3.txt": "c" * 20})
    data = load(books, tmp_path / "cache")
    assert told(data) == (
        "a" * 36 + "\n\n" + "b" * 54 + "\n\n" + "c" * 18,
        "aaaa\n\nbbbbbb\n\ncc",
    )
    # The first scored token comes after a separator as well.
    assert data.val[:1].tolist() == [ord("\n")]
    assert data.val_bytes == 4 + 6 + 2 + 2 * 2


def test_files_too_short_for_a_tail_of_their_own_give_their_share_together(tmp_path: Path) -> None:
    books = written(tmp_path / "books", {f"{i:03}": "xyz" for i in range(100)})
    for fraction, characters in ((0.1, 30), (0.5, 150), (0.001, 1)):
        data = load(books, tmp_path / "cache", fraction=fraction)
        assert sum(map(told(data)[1].count, "xyz")) == characters
        assert sum(map(told(data)[0].count, "xyz")) == 300 - characters


def test_a_folder_of_one_file_is_that_file(tmp_path: Path) -> None:
    books = written(tmp_path / "books", {"1.txt": "naïve " * 50, "2.txt": ""})
    one, other = load(books, tmp_path / "a"), load(f"{books}/1.txt", tmp_path / "b")
    content = "naïve " * 50
    assert one.text_hash == other.text_hash == hashlib.sha256(content.encode()).hexdigest()
    assert one.train[:].tolist() == other.train[:].tolist() == list(content.encode())[:315]
    assert one.val[:].tolist() == other.val[:].tolist() == list(content.encode())[314:]


def test_gpt2s_end_of_text_stands_between_files(tmp_path: Path) -> None:
    folder = bpe(tmp_path / "bpe")
    books = written(tmp_path / "books", {"1": "The end." * 5, "2": "The end." * 10})
    tokenizer = GPT2Tokenizer(str(folder))
    data = load(books, tmp_path / "cache", tokenizer)
    end = next(i for i in range(400) if tokenizer.decode(data.train[:1] * 0 + i) == "<|endoftext|>")
    first, second = "The end." * 4 + "The ", "The end." * 9
    ids = [tokenizer.encode(part, "data").tolist() for part in (first, second)]
    assert data.train[:].tolist() == [*ids[0], end, *ids[1]]
    assert data.val[:].tolist().count(end) == 2  # the context, and between the tails
    assert data.val[:1].tolist() == [end]


def test_a_bpe_without_an_end_of_text_has_the_plain_separator(tmp_path: Path) -> None:
    folder = bpe(tmp_path / "bpe")
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace("<|endoftext|>", "<|something|>"))
    books = written(tmp_path / "books", {"1": "a" * 20, "2": "b" * 30})
    data = load(books, tmp_path / "cache", GPT2Tokenizer(str(folder)))
    assert told(data) == ("a" * 18 + "\n\n" + "b" * 27, "aa\n\nbbb")


def test_held_out_text_and_its_bytes_are_the_same_for_all_tokenizers(tmp_path: Path) -> None:
    books = written(
        tmp_path / "books", {"1": "≈ π, naïve. " * 9, "2": "The end.\n" * 9, "3": "x" * 9}
    )
    tokenizers = ByteTokenizer(), CharTokenizer(), GPT2Tokenizer(str(bpe(tmp_path / "bpe")))
    found = [load(books, tmp_path / "cache", tokenizer) for tokenizer in tokenizers]
    scored = [told(data)[1].replace("<|endoftext|>", "\n\n") for data in found]
    assert scored[0] == scored[1] == scored[2]
    assert {data.val_bytes for data in found} == {len(scored[0].encode())}
    assert len({data.text_hash for data in found}) == 1


def test_val_path_is_held_out_whole_and_nothing_else_is(tmp_path: Path) -> None:
    books = written(tmp_path / "books", {"1": "a" * 40, "2": "b" * 60})
    other = written(tmp_path / "other", {"x": "held out", "y": "too"})
    data = load(books, tmp_path / "cache", CharTokenizer(), val_path=other)
    assert told(data) == ("a" * 40 + "\n\n" + "b" * 60, "held out\n\ntoo")
    assert data.val_bytes == len("held out\n\ntoo")
    data = load(f"{books}/1", tmp_path / "cache", val_path=f"{other}/x", fraction=0.5)
    assert told(data) == ("a" * 40, "held out")


def test_a_file_of_the_folder_that_is_held_out_is_not_trained_on(tmp_path: Path) -> None:
    books = written(tmp_path / "books", {"1": "a" * 40, "2": "b" * 60, "val/3": "c" * 9})
    (tmp_path / "link").symlink_to(tmp_path / "books" / "val")
    data = load(books, tmp_path / "cache", val_path=str(tmp_path / "link"))
    assert told(data) == ("a" * 40 + "\n\n" + "b" * 60, "c" * 9)
    with pytest.raises(DataError, match=r"data\.val_path: .*books holds out all of data\.path"):
        text(books, val_path=books)


def test_the_hash_is_of_the_content_and_of_what_is_held_out(tmp_path: Path) -> None:
    files = {"1": "a" * 40, "2": "b" * 60}
    books = written(tmp_path / "books", files)
    moved = str(shutil.copytree(books, tmp_path / "moved"))
    joined = written(tmp_path / "joined", {"1": "a" * 40 + "\n\n" + "b" * 60})
    other = written(tmp_path / "other", {"1": "a" * 39, "2": "ab" + "b" * 59})
    cache = tmp_path / "cache"

    def sha(path: str, val_path: str | None = None) -> str:
        return load(path, cache, val_path=val_path).text_hash

    assert sha(books) == sha(moved)
    assert sha(f"{books}/1", f"{books}/2") == sha(f"{moved}/1", f"{moved}/2")
    different = [
        sha(books),
        sha(joined),
        sha(other),
        sha(books, joined),
        sha(f"{books}/1"),
        sha(f"{books}/1", f"{books}/2"),
        sha(f"{books}/2", f"{books}/1"),
    ]
    assert len(set(different)) == len(different)


def test_byte_order_mark_and_carriage_returns_are_no_part_of_the_text(tmp_path: Path) -> None:
    plain = "First line\nsecond, \ufeff in it\n\nlast\n" * 3
    files = {
        "plain": (plain.encode(), []),
        "mark": (plain.encode("utf-8-sig"), ["byte order mark"]),
        "windows": (plain.replace("\n", "\r\n").encode(), ["CR"]),
        "old mac": (plain.replace("\n", "\r").encode(), ["CR"]),
        "both": (plain.replace("\n", "\r\n").encode("utf-8-sig"), ["CR", "byte order mark"]),
    }
    for name, (raw, left_out) in files.items():
        (tmp_path / name).write_bytes(raw)
        data = load(str(tmp_path / name), tmp_path / "cache", CharTokenizer())
        assert "".join(told(data)) == plain
        assert data.text_hash == hashlib.sha256(plain.encode()).hexdigest()
        assert data.reading["left_out"] == left_out
        assert data.tokenizer.settings()["characters"].count("\ufeff") == 1  # the one within


def test_empty_files_in_a_folder_are_named_and_passed_over_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = {"1.txt": "a" * 40, "4.txt": "b" * 60}
    books = written(tmp_path / "books", {**full, "2.txt": b"", "3.txt": b"\xef\xbb\xbf"})
    data = load(books, tmp_path / "cache")
    assert capsys.readouterr().err == (
        f"warning: data.path: empty files skipped: {books}/2.txt, {books}/3.txt\n"
    )
    assert data.text_hash == load(written(tmp_path / "full", full), tmp_path / "cache").text_hash
    load(books, tmp_path / "cache")
    assert capsys.readouterr().err == ""


def test_a_folder_of_empty_files_and_a_lone_empty_file_are_refused(tmp_path: Path) -> None:
    books = written(tmp_path / "books", {"1.txt": b"", "2.txt": b"\xef\xbb\xbf"})
    with pytest.raises(DataError, match=r"data\.path: no file with text in it below .*books"):
        text(books)
    with pytest.raises(DataError, match=r"data\.path: .*2\.txt is empty"):
        text(f"{books}/2.txt")
    book = written(tmp_path / "book", {"1.txt": "text"})
    with pytest.raises(DataError, match=r"data\.val_path: .*nowhere does not exist"):
        text(book, val_path=f"{book}/nowhere")


def test_a_folder_too_short_for_the_context_is_refused(tmp_path: Path) -> None:
    books = written(tmp_path / "books", {"1": "abc", "2": "def"})
    with pytest.raises(ConfigError, match=r"model\.context_length: 8 is too long .* at most 6"):
        load(books, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_a_run_on_a_folder_says_how_it_was_read(tmp_path: Path) -> None:
    books = written(tmp_path / "books", {"1": "One line.\r\n" * 30, "2": "Two.\n" * 30, "3": b""})
    run = train(tmp_path / "a", "data=text", f"data.path={books}", f"data.val_path={books}/2")
    assert summary(run)["data"] == {
        "text_sha256": summary(run)["data"]["text_sha256"],
        "tokenizer": "byte",
        "vocab_size": 256,
        "train_tokens": 300,
        "val_tokens": 150,
        "val_bytes": 150,
        "documents": 1,
        "held_out": "documents",
        "separator": "\n\n",
        "left_out": ["CR"],
    }
    assert any("val/loss" in row for row in rows(run))
