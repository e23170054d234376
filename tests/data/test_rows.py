"""Rows of Parquet, JSON Lines and Arrow files and of the hub's library become documents."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from loading import load

from gptattn.data.hub import Rows
from gptattn.errors import ConfigError, DataError

TEXTS = [f"Row {i}: naïve π.\n" * (i % 7) + f"{i}" for i in range(97)]


def json_lines(folder: Path) -> Path:
    file = folder / "rows.jsonl"
    lines = [
        json.dumps({"id": i, "text": text}, ensure_ascii=i % 2 == 0) for i, text in enumerate(TEXTS)
    ]
    file.write_text("\n".join(lines))
    return file


def parquet(folder: Path) -> Path:
    file = folder / "rows.parquet"
    table = pyarrow.table({"meta": [{"a": i} for i in range(len(TEXTS))], "text": TEXTS})
    pyarrow.parquet.write_table(table, file, row_group_size=10)
    return file


def arrow_stream(folder: Path) -> Path:
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(str(folder / "set"))
    return folder / "set"


KINDS = {make.__name__: make for make in (json_lines, parquet, arrow_stream)}


def read(source: Rows, side: str | None = None, fraction: float = 0.1) -> list[str]:
    """The documents of one side."""
    return [piece.text for piece in source.pieces(fraction) if side in (None, piece.side)]


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_each_row_is_a_document_in_order(make: Callable[[Path], Path], tmp_path: Path) -> None:
    file = make(tmp_path)
    assert read(Rows(None, path=str(file))) == TEXTS
    with pytest.raises(DataError, match=r"^data\.text_field: .* has no field 'body', only "):
        read(Rows(None, path=str(file), text_field="body"))
    if make in (json_lines, parquet):
        other = "id" if make is json_lines else "meta"
        with pytest.raises(DataError, match=rf"^data\.text_field: .*: a row's '{other}' is not te"):
            read(Rows(None, path=str(file), text_field=other))


def test_the_hash_of_a_document_decides_its_side_wherever_it_stands(tmp_path: Path) -> None:
    source, other = (Rows(None, path=str(make(tmp_path))) for make in (json_lines, parquet))
    train, val = (read(source, side, 0.3) for side in ("train", "val"))
    assert sorted([*train, *val]) == sorted(TEXTS)
    assert 0.15 < len(val) / len(TEXTS) < 0.45
    assert read(other, "val", 0.3) == val
    assert set(read(other, "val", 0.1)) < set(val)


def test_a_separator_stands_between_rows_but_for_empty_ones(tmp_path: Path) -> None:
    lines = [json.dumps({"text": "" if i % 3 else f"row {i}"}) for i in range(60)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "b.jsonl").write_text('{"text": "held"}\n{"text": "out"}')
    source = Rows(None, path=str(tmp_path / "a.jsonl"), val_path=str(tmp_path / "b.jsonl"))
    data = load(source, tmp_path / "cache")
    decode = data.tokenizer.decode
    assert decode(data.train[:]) == "\n\n".join(f"row {i}" for i in range(0, 60, 3))
    assert decode(data.val[:]) == "\nheld\n\nout"
    assert data.facts()["documents"] == 20


@pytest.mark.parametrize("streaming", [False, True])
def test_a_data_set_of_the_hubs_library(
    streaming: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    json_lines(tmp_path / "set").rename(tmp_path / "set" / "train.jsonl")
    (tmp_path / "set" / "test.jsonl").write_text(json.dumps({"id": 1, "text": "held out"}))
    name = str(tmp_path / "set")
    source = Rows(name, streaming=streaming, val_split="test")
    assert read(source, "train") == TEXTS
    assert read(source, "val") == ["held out"]
    stamp = source.stamp()
    assert Rows(name, streaming=streaming, val_split="test").stamp() == stamp
    (tmp_path / "set" / "test.jsonl").write_text(json.dumps({"id": 1, "text": "another text"}))
    assert Rows(name, streaming=streaming, val_split="test").stamp() != stamp
    with pytest.raises(DataError, match=r"^data\.text_field: .* no field 'body', only id, text"):
        read(Rows(name, streaming=streaming, text_field="body"))
    with pytest.raises(DataError, match=r"^data: .* cannot be read \(.*; check its name, its form"):
        read(Rows(name, streaming=streaming, split="nosuch"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"name": None}, r"^data\.name: give data\.name=owner/name of the hub, perhaps with ano"),
        ({"name": None, "path": "."}, r"^data\.path: \. has no \.parquet, .*; for plain text, use"),
        ({"name": "a/b", "val_path": "x.json"}, r"^data\.name: give data\.name=.* perhaps with"),
        ({"name": None, "path": ".", "val_split": "x"}, r"^data\.name: give data\.name=.* perhaps"),
    ],
)
def test_what_is_missing_is_said_in_one_line(
    arguments: dict[str, str | None], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text("no rows")
    with pytest.raises((ConfigError, DataError), match=said):
        Rows(**arguments)  # type: ignore[arg-type]


def test_without_the_library_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"^data: hf needs the extra hf: pip install 'gptattn"):
        load(Rows(None, path=str(json_lines(tmp_path))), tmp_path / "cache")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.parquet", "no rows"),
        ("x.json", '{"text": "a"}\n{"text": 1'),
        ("x.json", '{"text": "a \\ud83d b"}'),
    ],
)
def test_a_damaged_file_is_named_in_one_line(
    name: str, content: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError) as error:
        load(Rows(None, path=str(tmp_path / name)), tmp_path / "cache")
    assert str(tmp_path / name) in error.value.message
    assert "\n" not in error.value.message
    assert capfd.readouterr().err == ""
