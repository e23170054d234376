"""Rows of Parquet, JSON Lines and Arrow files and of the hub's library become documents."""

import json
import sys
from pathlib import Path

import datasets
import pyarrow
import pytest
from loading import load
from support import refuses

from gptattn.data.hub import Rows

TEXTS = [f"Row {i}: naïve π.\n" * (i % 7) + f"{i}" for i in range(97)]


ROWS = datasets.Dataset.from_dict({"id": [*range(97)], "text": TEXTS})


def save(form: str, folder: Path) -> str:
    """Write the rows to a file of this form; "arrow" is a folder of the library's own."""
    place = str(folder / f"rows.{form}")
    {"jsonl": ROWS.to_json, "parquet": ROWS.to_parquet, "arrow": ROWS.save_to_disk}[form](place)
    return place


def read(source: Rows, side: str | None = None, fraction: float = 0.1) -> list[str]:
    """The documents of one side."""
    return [piece.text for piece in source.pieces(fraction) if side in (None, piece.side)]


@pytest.mark.parametrize("form", ["jsonl", "parquet", "arrow"])
def test_each_row_is_a_document_in_order(form, tmp_path):
    place = save(form, tmp_path)
    assert read(Rows(None, path=place)) == TEXTS
    with refuses("data.text_field: id, text", 3):
        read(Rows(None, path=place, text_field="body"))
    with refuses("data.text_field: 'id'", 3):
        read(Rows(None, path=place, text_field="id"))


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ('{"text": "a"}\n\n{"text": 7}', "row 2 has 7"),
        ('{"text": "a"}\n{"text": null}', "row 2 has None"),
        ('{"text": "a"}\n{"text": {"text": "b"}}', "row 2 has {'text'"),
        ('{"text": "a"}\n{"other": 1}', "row 2"),
        ('[{"text": "a"},\n {"text": 7}]', "row 2 has 7"),
        ('{"text": "a"}\n"b"', "row 2: 'b'"),
        ('{"text": "a"}\n{"text": "b', "row 2"),
    ],
)
def test_a_row_that_is_not_text_is_refused(rows, said, tmp_path):
    file = tmp_path / "rows.json"
    file.write_text(rows)
    with refuses(f"*: {said}", 3):
        read(Rows(None, path=str(file)))


def test_what_json_says_is_text_stays_text_in_a_file_of_any_name(tmp_path):
    file, texts = tmp_path / "b[1]*::{c} é.jsonl", ["2020-01-05", "7", "null"]
    (tmp_path / "b1::{c} é.jsonl").write_text('{"text": "another"}')
    file.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    assert read(Rows(None, path=str(file))) == texts


def test_arrow_s_file_format_is_read_as_its_stream(tmp_path):
    table = ROWS.with_format("arrow")[:]
    with pyarrow.ipc.new_file(tmp_path / "rows.arrow", table.schema) as file:
        file.write_table(table, max_chunksize=10)
    assert read(Rows(None, path=str(tmp_path / "rows.arrow"))) == TEXTS


def test_a_null_row_of_a_table_is_refused_by_its_number(tmp_path):
    place = str(tmp_path / "rows.parquet")
    datasets.Dataset.from_dict({"text": [*TEXTS, None]}).to_parquet(place)
    with refuses("data.text_field: row 98", 3):
        read(Rows(None, path=place))


def test_the_hubs_library_quotes_no_rows(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text('{"text": "a"}\n' * 5 + '{"text": 7}\n')
    with refuses("data: changed from string to number", 3):
        read(Rows(str(tmp_path / "set"), streaming=True))


def test_the_hash_of_a_document_decides_its_side_wherever_it_stands(tmp_path):
    source, other = (Rows(None, path=save(form, tmp_path)) for form in ("jsonl", "parquet"))
    train, val = (read(source, side, 0.3) for side in ("train", "val"))
    assert sorted([*train, *val]) == sorted(TEXTS)
    assert 0.15 < len(val) / len(TEXTS) < 0.45
    assert read(other, "val", 0.3) == val
    assert set(read(other, "val", 0.1)) < set(val)


def test_a_separator_stands_between_rows_but_for_empty_ones(tmp_path):
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
def test_a_data_set_of_the_hubs_library(streaming, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    name, held_out = str(tmp_path / "set"), tmp_path / "set" / "test.jsonl"
    ROWS.to_json(f"{name}/train.jsonl")
    held_out.write_text('{"id": 1, "text": "held out"}')
    one, other = (Rows(name, streaming=streaming, val_split="test") for _ in range(2))
    assert read(one, "train") == TEXTS
    assert read(one, "val") == ["held out"]
    stamp = one.stamp()
    assert other.stamp() == Rows(name, streaming=not streaming, val_split="test").stamp() == stamp
    held_out.write_text('{"id": 1, "text": "another text"}')
    assert other.stamp() != stamp
    with refuses("data: cannot be read", 3):
        read(Rows(name, streaming=streaming, split="nosuch"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"name": None}, "data.name: data.name=owner/name"),
        ({"name": None, "path": "."}, "data.path: .parquet"),
        ({"name": "a/b", "val_path": "x.json"}, "data.name: data.name="),
    ],
)
def test_what_is_missing_is_said_in_one_line(arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text("no rows")
    with refuses(said, 3 if "path:" in said else 2):
        Rows(**arguments)


def test_without_the_library_it_says_what_to_install(tmp_path, monkeypatch):
    place = save("parquet", tmp_path)
    for library in ("datasets", "pyarrow"):
        monkeypatch.setitem(sys.modules, library, None)
    for source in (Rows("a/b"), Rows(None, path=place)):
        with refuses("data: extra hf"):
            load(source, tmp_path / "cache")
