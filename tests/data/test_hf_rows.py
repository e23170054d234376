"""Rows of Parquet, JSON Lines and Arrow files and of the hub's library become documents."""

import json
from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from gptattn.data import hf_rows as rows_module
from gptattn.data import segments
from gptattn.data.hf_rows import rows
from gptattn.data.prepare import PartedText
from gptattn.data.shards import ShardedTokens
from gptattn.data.stored import in_cache
from gptattn.data.tokenizer import ByteTokenizer
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


def arrow_file(folder: Path) -> Path:
    file, table = folder / "rows.arrow", pyarrow.table({"text": TEXTS})
    with pyarrow.ipc.new_file(str(file), table.schema) as writer:
        writer.write_table(table, max_chunksize=10)
    return file


def arrow_stream(folder: Path) -> Path:
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(str(folder / "set"))
    return folder / "set"


KINDS = {make.__name__: make for make in (json_lines, parquet, arrow_file, arrow_stream)}


def texts(source: PartedText, side: str | None = None) -> list[str]:
    """The documents of one side, as they come back from their separators."""
    return [*source.pieces(side)]


@pytest.mark.parametrize("size", [100, 2**26])
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_each_row_is_a_document_in_order(
    make: Callable[[Path], Path], size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "PART_BYTES", size)
    source = rows(None, path=str(make(tmp_path)))
    assert texts(source) == TEXTS
    # `datasets` writes a thousand rows at a time.
    assert (len(source.parts) > 5) == (size == 100 and make is not arrow_stream)


def test_the_hash_of_a_document_decides_its_side_wherever_it_stands(tmp_path: Path) -> None:
    source = rows(None, path=str(json_lines(tmp_path)), val_fraction=0.3)
    train, val = texts(source, "train"), texts(source, "val")
    assert sorted([*train, *val]) == sorted(TEXTS)
    assert 0.15 < len(val) / len(TEXTS) < 0.45
    other = rows(None, path=str(parquet(tmp_path)), val_fraction=0.3)
    assert texts(other, "val") == val
    less = rows(None, path=str(parquet(tmp_path)), val_fraction=0.1)
    assert set(texts(less, "val")) < set(val)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_data_set_of_the_hubs_library(
    streaming: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    json_lines(tmp_path / "set").rename(tmp_path / "set" / "train.jsonl")
    parquet(tmp_path / "set").rename(tmp_path / "set" / "x.parquet")
    (tmp_path / "set" / "x.parquet").unlink()
    (tmp_path / "set" / "test.jsonl").write_text(json.dumps({"id": 1, "text": "held out"}))
    name = str(tmp_path / "set")
    source = rows(name, streaming=streaming, val_split="test")
    assert texts(source, "train") == TEXTS
    assert texts(source, "val") == ["held out"]
    keys = [segment.key() for part in source.parts for segment in part]
    again = rows(name, streaming=streaming, val_split="test")
    assert [segment.key() for part in again.parts for segment in part] == keys
    with pytest.raises(DataError, match=r"^data\.text_field: .* no field 'body', only id, text"):
        rows(name, streaming=streaming, text_field="body")
    with pytest.raises(DataError, match=r"^data\.name: .* cannot be loaded \(.*; check data\.name"):
        rows(name, streaming=streaming, split="nosuch")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"name": None}, r"^data\.name: give data\.name=owner/name of the hub, or data\.path="),
        ({"name": "a/b", "path": "c"}, r"^data\.name: give data\.name=owner/name of the hub"),
        ({"name": None, "path": "nosuch"}, r"^data\.path: nosuch does not exist"),
        ({"name": None, "path": "."}, r"^data\.path: \. has no \.parquet, .*; for plain text, use"),
        ({"name": None, "path": "x.parquet"}, r"^data: x\.parquet cannot be read \(Parquet"),
        ({"name": None, "path": "x.arrow"}, r"^data: x\.arrow cannot be read \(File is too small"),
        ({"name": None, "path": "x.json", "val_path": "x.json"}, r"^data\.val_path: x\.json holds"),
        (
            {"name": None, "path": "x.json", "val_split": "test"},
            r"^data\.val_split: is of data\.nam",
        ),
        (
            {"name": "a/b", "val_path": "x.json"},
            r"^data\.val_path: is of data\.path; give data\.val",
        ),
        ({"name": "a/b", "val_split": "train"}, r"^data\.val_split: train is trained on; give ano"),
    ],
)
def test_what_is_missing_is_said_in_one_line(
    arguments: dict[str, str | None], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = arguments.get("path")
    if path is not None and path.startswith("x"):
        Path(path).write_text("no rows")
    with pytest.raises((ConfigError, DataError), match=said):
        rows(**arguments)  # type: ignore[arg-type]


def test_what_is_held_out_is_not_trained_on_and_what_is_hidden_is_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    for name in ("a.jsonl", "held.jsonl", ".cache/b.jsonl"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"\xef\xbb\xbf" + json.dumps({"text": name}).encode())
    (folder / "c.json").mkdir()
    source = rows(None, path=str(folder), val_path=str(folder / "held.jsonl"))
    assert texts(source, "train") == ["a.jsonl"]
    assert texts(source, "val") == ["held.jsonl"]


@pytest.mark.parametrize("make", [parquet, arrow_file, arrow_stream])
def test_damage_within_a_file_is_told(make: Callable[[Path], Path], tmp_path: Path) -> None:
    path = make(tmp_path)
    (file,) = [path] if path.is_file() else path.glob("*.arrow")
    whole, said = file.read_bytes(), []
    for place in range(100, len(whole) - 300, 211):
        file.write_bytes(whole[:place] + b"\xff" * 200 + whole[place + 200 :])
        try:
            texts(rows(None, path=str(file)))
        except DataError as error:
            said.append(error.message)
    assert said
    assert all(message.startswith(f"{file} ") for message in said)


def test_a_row_that_is_no_object_or_too_deep_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "LINE_BYTES", 30_000)
    for line, said in (
        ("[1]", r"^data\.text_field: .*at byte 14: it is no object"),
        ('{"text": 1', r"^data: .*the line at byte 14, is no JSON \(.*\); give one object in eac"),
        ('{"text": "a \\ud83d b"}', r"is no JSON \(it has half a character, from \\ud8"),
        ('{"text": "\\ud83d\\ude00"', r"is no JSON \(Input data was truncated\)"),
        ("[" * 20_000, r"the line at byte 14, is no JSON \(.*\); give one object in each line"),
        ('"' * 40_000, r"the line at byte 14, is no JSON \(longer than 30,000 bytes\)"),
    ):
        (tmp_path / "x.json").write_text(f'{{"text": "a"}}\n{line}')
        with pytest.raises(DataError, match=said):
            texts(rows(None, path=str(tmp_path / "x.json")))


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_a_field_that_is_missing_or_no_text_is_named(
    make: Callable[[Path], Path], tmp_path: Path
) -> None:
    file = make(tmp_path)
    with pytest.raises(DataError, match=r"no field 'body', only "):
        texts(rows(None, path=str(file), text_field="body"))
    if make in (json_lines, parquet):
        other = "id" if make is json_lines else "meta"
        with pytest.raises(DataError, match=rf"'{other}'"):
            texts(rows(None, path=str(file), text_field=other))


@pytest.mark.parametrize("damage", ["ids", "shard", "index", "no index"])
def test_ids_that_are_damaged_in_the_cache_are_encoded_again(
    damage: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cache, file = tmp_path / "cache", json_lines(tmp_path)

    def ids() -> list[int]:
        text = rows(None, path=str(file))
        found = in_cache(text, ByteTokenizer(), "byte", cache)
        return ShardedTokens(found.train)[:].tolist()

    before = ids()
    (shard,) = cache.glob("prepared-*/train_000000.bin")
    if damage == "ids":
        whole = shard.read_bytes()
        shard.write_bytes(whole[:-2] + b"\1\0")
    elif damage == "shard":
        shard.unlink()
    elif damage == "index":
        shard.with_name("index.json").write_text("{")
    else:
        shard.with_name("index.json").unlink()
    assert ids() == before
    said = capfd.readouterr().err.splitlines()
    assert len(said) == (damage != "no index")
    assert all(one.startswith(f"data: {shard.parent}") for one in said)
    assert all(one.endswith("; encoding again") for one in said)
    assert ids() == before
    assert capfd.readouterr().err == ""
