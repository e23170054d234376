"""`data=bin` reads ids as other projects write them, and what scripts/prepare.py wrote."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support import TEXT, Call, bpe, command, summary, tiny, train

from gptattn.data import stored
from gptattn.data.bpe import GPT2Tokenizer
from gptattn.data.sampler import training_batch
from gptattn.data.shards import HEADER_BYTES, Shard, ShardedTokens, header, shard_of
from gptattn.data.stored import bin_files, stored_data
from gptattn.data.tokenizer import ByteTokenizer, CharTokenizer, TaskIds
from gptattn.data.tokens import TokenData
from gptattn.data.trained_bpe import TrainedBPE
from gptattn.errors import ConfigError, DataError, UserError

IDS = np.random.default_rng(0).integers(0, 256, 1_000).astype("<u2")


def sharded(file: Path, ids: NDArray[np.uint16]) -> Path:
    """Write a shard as modded-nanogpt's data/fineweb.py does, by its own description."""
    numbers = np.zeros(256, dtype=np.int32)
    numbers[0], numbers[1], numbers[2] = 20240520, 1, len(ids)
    file.write_bytes(numbers.tobytes() + ids.astype(np.uint16).tobytes())
    return file


def load(path: Path, cache: Path, fraction: float = 0.1, **given: str) -> TokenData:
    found = bin_files(str(path), cache_dir=str(cache), **given)
    return stored_data(found, ByteTokenizer(), context_length=8, val_fraction=fraction)


def test_the_header_is_that_of_modded_nanogpt(tmp_path: Path) -> None:
    file = sharded(tmp_path / "x.bin", IDS)
    assert file.read_bytes()[:HEADER_BYTES] == header(len(IDS))
    assert shard_of(file, "data.path") == Shard(file, HEADER_BYTES // 2, len(IDS))


def test_slices_go_across_shards_with_and_without_headers(tmp_path: Path) -> None:
    cuts = [0, 7, 8, 400, 1000]
    files = []
    for i, (start, stop) in enumerate(pairwise(cuts)):
        file = tmp_path / f"{i}.bin"
        if i % 2:
            IDS[start:stop].tofile(file)
        files.append(file if i % 2 else sharded(file, IDS[start:stop]))
    tokens = ShardedTokens([shard_of(file, "data.path") for file in files])
    assert len(tokens) == 1000
    for start in (0, 6, 7, 8, 399, 990):
        for stop in (start, start + 1, start + 9, 401, 1000, 2000):
            np.testing.assert_array_equal(tokens[start:stop], IDS[start:stop])
            part = tokens.part(start, 1000)
            np.testing.assert_array_equal(part[: stop - start], IDS[start:][: stop - start])
    np.testing.assert_array_equal(np.concatenate([*tokens.pieces()]), IDS)
    ours = training_batch(tokens, 3, 5, 4, 16)
    for found, expected in zip(ours, training_batch(IDS, 3, 5, 4, 16), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("form", ["nanogpt", "modded", "one file", "val_path"])
def test_each_form_is_read_as_it_is(form: str, tmp_path: Path) -> None:
    folder = tmp_path / "ids"
    folder.mkdir()
    given = {}
    path = folder
    if form == "modded":
        sharded(folder / "fineweb_train_000001.bin", IDS[:300])
        sharded(folder / "fineweb_train_000002.bin", IDS[300:900])
        sharded(folder / "fineweb_val_000000.bin", IDS[900:])
    else:
        IDS[: 1000 if form == "one file" else 900].tofile(folder / "train.bin")
        if form != "one file":
            name = "val.bin" if form == "nanogpt" else "rest.bin"
            IDS[900:].tofile(folder / name)
        if form == "val_path":
            given = {"val_path": str(folder / "rest.bin")}
        if form == "one file":
            path = folder / "train.bin"
    data = load(path, tmp_path / "cache", **given)
    np.testing.assert_array_equal(data.train[:], IDS[:900])
    # The tail of one file has the last training id as context.
    val = IDS[899:] if form == "one file" else IDS[900:]
    np.testing.assert_array_equal(data.val[:], val)
    assert data.val_bytes == len(val) - 1
    again = load(path, tmp_path / "cache", **given)
    assert again.text_hash == data.text_hash
    changed = IDS.copy()
    changed[5] ^= 1
    first = sorted(folder.glob("*train*.bin"))[0]
    raw = bytearray(first.read_bytes())
    raw[-1800 if form == "nanogpt" else -10] ^= 1
    first.write_bytes(raw)
    assert load(path, tmp_path / "cache", **given).text_hash != data.text_hash


def test_the_hash_is_of_the_ids_and_of_what_is_held_out(tmp_path: Path) -> None:
    IDS.tofile(tmp_path / "plain.bin")
    sharded(tmp_path / "headed.bin", IDS)
    plain, headed = (load(tmp_path / f"{n}.bin", tmp_path / "c") for n in ("plain", "headed"))
    assert plain.text_hash == headed.text_hash
    held = load(tmp_path / "plain.bin", tmp_path / "c", val_path=str(tmp_path / "headed.bin"))
    assert held.text_hash != plain.text_hash


def test_what_is_held_out_is_not_trained_on(tmp_path: Path) -> None:
    for i in range(3):
        IDS[300 * i :][:300].tofile(tmp_path / f"train_{i}.bin")
    held_out = str(tmp_path / "train_1.bin")
    data = load(tmp_path, tmp_path / "c", val_path=held_out)
    np.testing.assert_array_equal(data.train[:], np.concatenate([IDS[:300], IDS[600:900]]))
    with pytest.raises(DataError, match=r"^data\.val_path: .* holds out all of data\.path; give"):
        load(tmp_path / "train_1.bin", tmp_path / "c", val_path=held_out)


def test_a_file_is_read_through_once_until_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    IDS.tofile(tmp_path / "x.bin")
    before = load(tmp_path / "x.bin", tmp_path / "c").text_hash
    (record,) = (tmp_path / "c").glob("*.ids.json")
    monkeypatch.setattr(ShardedTokens, "pieces", None)
    assert bin_files(str(tmp_path / "x.bin"), cache_dir=str(tmp_path / "c")).text_hash == before
    monkeypatch.undo()
    record.write_text("{damaged")
    assert load(tmp_path / "x.bin", tmp_path / "c").text_hash == before


def test_bytes_of_an_end_of_text_are_those_of_any_separator(tmp_path: Path) -> None:
    tokenizer = GPT2Tokenizer(str(bpe(tmp_path / "bpe")))
    end = tokenizer.separator()[1]
    ids = np.concatenate([end, tokenizer.encode("One.", "x"), end, tokenizer.encode("Two", "x")])
    ids.astype("<u2").tofile(tmp_path / "val.bin")
    np.tile(ids, 9).astype("<u2").tofile(tmp_path / "train.bin")
    found = bin_files(str(tmp_path), cache_dir=str(tmp_path / "c"))
    data = stored_data(found, tokenizer, context_length=8, val_fraction=0.1)
    assert data.val_bytes == len("One.") + 2 + len("Two")


def broken(tmp_path: Path, how: str) -> Path:
    file = sharded(tmp_path / "x.bin", IDS)
    raw = file.read_bytes()
    if how == "version":
        raw = raw[:4] + np.int32(7).tobytes() + raw[8:]
    file.write_bytes({"odd": b"abc", "empty": b"", "cut": raw[:-2]}.get(how, raw))
    return {"no folder": tmp_path / "none", "no files": tmp_path / "d"}.get(how, file)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("odd", "has 3 bytes, which are no 16-bit ids"),
        ("empty", "has 0 bytes, which are no 16-bit ids"),
        ("cut", "has 3,022 bytes, which are not those of its 1,000 ids"),
        ("version", "is of version 7; only 1 is known"),
        ("no folder", "does not exist; give a folder with .bin files, or a file"),
        ("no files", r"has no \*train\*.bin; give a folder with .bin files of ids"),
    ],
)
def test_what_is_no_file_of_ids_is_named(how: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    with pytest.raises(DataError, match=said):
        load(broken(tmp_path, how), tmp_path / "c")


def test_ids_and_tokenizer_must_fit(tmp_path: Path) -> None:
    (IDS + 50_000).tofile(tmp_path / "x.bin")
    found = bin_files(str(tmp_path / "x.bin"), cache_dir=str(tmp_path / "c"))
    sizes = {"context_length": 8, "val_fraction": 0.1}
    with pytest.raises(ConfigError, match=r"^tokenizer: has 256 ids, and the files have id 50,255"):
        stored_data(found, ByteTokenizer(), **sizes)
    with pytest.raises(ConfigError, match=r"^tokenizer\.vocab_size: is not set; .* give 50256 or"):
        stored_data(found, TaskIds(), **sizes)
    for without in (CharTokenizer(), TrainedBPE(300)):
        with pytest.raises(ConfigError, match=r"^tokenizer: takes its vocabulary from a text, and"):
            stored_data(found, without, **sizes)
    data = stored_data(found, TaskIds(50_257), **sizes)
    assert data.val_bytes is None
    with pytest.raises(ConfigError, match=r"^model\.context_length: the files have 900 ids for tr"):
        stored_data(found, TaskIds(50_257), context_length=900, val_fraction=0.1)


def test_a_run_on_plain_ids_without_a_tokenizer(tmp_path: Path) -> None:
    IDS.tofile(tmp_path / "x.bin")
    ids = ("tokenizer=none", "tokenizer.vocab_size=300", "data=bin", f"data.path={tmp_path}/x.bin")
    assert command(tmp_path / "refused", *tiny(tmp_path, *ids)) == 2
    run = train(tmp_path / "run", *ids, "sample.tokens=0")
    data = summary(run)["data"]
    assert data["val_tokens"] == 100
    assert "val_bytes" not in data  # of an unknown text


def test_a_prepared_text_is_trained_on_with_its_tokenizer(
    tmp_path: Path, call: Call, capfd: pytest.CaptureFixture[str]
) -> None:
    text, to = tmp_path / "book.txt", tmp_path / "to"
    text.write_text(TEXT)
    source = ("data=text", f"data.path={text}", "tokenizer=char", f"to={to}")
    code, out, err = call("prepare", *source, "workers=1")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1].endswith(f"train.py data=bin data.path={to} tokenizer=char")
    run = train(tmp_path / "run", "data=bin", f"data.path={to}", "tokenizer=char")
    assert summary(run)["data"]["documents"] == 2  # one, of which the end is held out
    capfd.readouterr()
    for other in ("byte", "bpe"):
        chosen = tiny(tmp_path / "run", "data=bin", f"data.path={to}", f"tokenizer={other}")
        assert command(tmp_path / "run", *chosen) == 2
        said = "error: tokenizer: is not that of the ids; give tokenizer=char\n"
        assert capfd.readouterr().err == said
    (shard,) = to.glob("train_*.bin")
    raw = bytearray(shard.read_bytes())
    raw[-2] ^= 1
    shard.write_bytes(raw)
    with pytest.raises(UserError, match=r"^data\.path: .*train_000000\.bin is damaged; remove"):
        bin_files(str(to), cache_dir=str(tmp_path / "c"))
    shard.unlink()
    with pytest.raises(
        DataError, match=r"train_000000\.bin is missing; remove .* prepare it again"
    ):
        bin_files(str(to), cache_dir=str(tmp_path / "c"))
    index = json.loads((to / "index.json").read_text())
    for change, said in (
        ({"format": 9}, r"it is of another version"),
        ({"shards": []}, r"it has no shards of both sides"),
        ({"plan": 3}, r"Expected `str`, got `int` - at `\$\.plan`"),
    ):
        (to / "index.json").write_text(json.dumps(index | change))
        with pytest.raises(DataError, match=rf"index\.json cannot be used \({said}\)"):
            bin_files(str(to), cache_dir=str(tmp_path / "c"))


def test_large_files_say_that_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    IDS.tofile(tmp_path / "x.bin")
    monkeypatch.setattr(stored, "LARGE", 1)
    load(tmp_path / "x.bin", tmp_path / "c")
    assert capfd.readouterr().err == "data: checking 0.0 GB of ids, once\n"


def test_a_file_that_is_held_out_is_not_trained_on(tmp_path: Path) -> None:
    for name in ("train", "trainval"):
        IDS[:300].astype("<u2").tofile(tmp_path / f"{name}.bin")
    found = bin_files(str(tmp_path), cache_dir=str(tmp_path / "c"))
    assert [shard.path.name for shard in found.train] == ["train.bin"]
    assert [shard.path.name for shard in found.val] == ["trainval.bin"]
