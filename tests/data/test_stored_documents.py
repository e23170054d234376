"""Documents are kept apart in prepared texts, in files of ids, and in mixtures."""

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from support import TEXT, bpe, command, tiny, train

from gptattn.data.bpe import GPT2Tokenizer
from gptattn.data.hf_rows import rows
from gptattn.data.prepare import fit, prepare
from gptattn.data.stored import bin_files, stored_data
from gptattn.data.tokenizer import ByteTokenizer, Tokenizer
from gptattn.data.tokens import TokenData
from gptattn.errors import ConfigError, DataError

LINES = [f'{{"text": "{"abcdefgh"[i % 8] * (5 + i % 7)}"}}' for i in range(200)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text("\n".join(LINES))
    return tmp_path / "rows.jsonl"


def load(folder: Path, tokenizer: Tokenizer, cache: Path) -> TokenData:
    found = bin_files(str(folder), cache_dir=str(cache))
    return stored_data(found, tokenizer, context_length=40, val_fraction=0.1, mask_documents=True)


@pytest.mark.parametrize("part", [400, 2**20])
def test_a_prepared_text_knows_where_its_documents_begin(
    file: Path, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gptattn.data.hf_rows.PART_BYTES", part)
    to, text = file.parent / "to", rows(None, path=str(file))
    fit(ByteTokenizer(), text, file.parent)
    prepare(text, ByteTokenizer(), to, choice="byte", workers=1)
    data = load(to, ByteTokenizer(), file.parent / "cache")
    for batch in (data.training_batch(1, 2, 6, 40), *data.validation(2, 40)):
        for ids, _, documents in zip(*batch, strict=True):
            # A document begins with the two line feeds before it, and its row has one letter.
            begins = (ids == 10) & (ids.roll(-1) == 10)
            begins[0], begins[-1] = False, bool(documents[-1] > documents[-2])
            assert torch.equal(documents - documents[0], begins.cumsum(0))
            for number in documents.unique():
                letters = ids[(documents == number) & (ids != 10)].unique()
                assert len(letters) <= 1


@pytest.mark.parametrize("content", [None, b"", bytes(8)])
def test_beginnings_that_are_missing_or_damaged_are_refused(
    file: Path, content: bytes | None
) -> None:
    to, text = file.parent / "to", rows(None, path=str(file))
    prepare(text, ByteTokenizer(), to, choice="byte", workers=1)
    (to / "train_000000.documents").unlink()
    if content is not None:
        (to / "train_000000.documents").write_bytes(content)
    with pytest.raises(DataError, match=r"train_000000\.documents is missing or damaged; remove "):
        load(to, ByteTokenizer(), file.parent / "cache")


def test_an_end_of_text_tells_in_files_of_ids(tmp_path: Path) -> None:
    tokenizer = GPT2Tokenizer(str(bpe(tmp_path / "bpe")))
    (end,) = tokenizer.separator()[1]
    ids = np.tile(np.array([end, 1, 2, 3, end, 4, 5], dtype="<u2"), 30)
    ids.tofile(tmp_path / "x.bin")
    data = load(tmp_path / "x.bin", tokenizer, tmp_path / "cache")
    found, _, documents = data.training_batch(1, 1, 4, 40)
    later = (found[:, 1:] == int(end)).cumsum(1)
    assert torch.equal(documents, torch.cat([torch.zeros(4, 1, dtype=torch.int64), later], 1))
    (ids % 100).tofile(tmp_path / "y.bin")
    with pytest.raises(ConfigError, match=r"^data\.mask_documents: needs ids with an end of text"):
        load(tmp_path / "y.bin", ByteTokenizer(), tmp_path / "cache")


def test_a_run_on_a_mixture_keeps_documents_apart(file: Path) -> None:
    (file.parent / "texts").mkdir()
    for name in "ab":
        (file.parent / "texts" / name).write_text(TEXT)
    x, y = (
        f"x:{{data:hf,path:{file},weight:1}}",
        f"y:{{data:text,path:{file.parent}/texts,weight:2}}",
    )
    chosen = ("data=mixture", f"data.sources={{{x},{y}}}")
    run = train(file.parent / "run", *chosen, "data.mask_documents=true")
    assert yaml.safe_load((run / "config.yaml").read_text())["data"]["mask_documents"] is True
    assert (
        command(file.parent / "no", *tiny(file.parent / "no", *chosen, "data.mask_documents=1"))
        == 2
    )
