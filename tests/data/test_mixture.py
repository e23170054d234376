"""`data=mixture`: each row of a batch comes from one text, drawn with the texts' weights."""

from pathlib import Path

import numpy as np
import pytest
import torch
from loading import documents, load, request
from support import TEXT

from gptattn.build.data import build_data
from gptattn.data.mixture import Mixture, MixtureData
from gptattn.data.tokenizer import ByteTokenizer, CharTokenizer
from gptattn.errors import ConfigError, UserError
from gptattn.settings.compose import settings

T = 8


@pytest.fixture
def mixture(tmp_path: Path) -> MixtureData:
    # Texts of one letter, so that each row shows where it comes from.
    sources = {name: load(name * (500 + 100 * i), tmp_path) for i, name in enumerate("abc")}
    return MixtureData(sources, {"a": 1.0, "b": 3.0, "c": 4.0}, ByteTokenizer())


def test_rows_come_from_the_texts_with_their_weights(mixture):
    drawn = np.concatenate(
        [mixture.chosen(seed, step, 16) for seed in range(5) for step in range(50)]
    )
    shares = np.bincount(drawn, minlength=3) / len(drawn)
    # Four standard deviations of a share over 4,000 rows.
    np.testing.assert_allclose(shares, [1 / 8, 3 / 8, 4 / 8], atol=4 * (0.25 / len(drawn)) ** 0.5)
    ids, targets = mixture.training_batch(7, 3, 16, T)
    assert ids.shape == targets.shape == (16, T)
    letters = torch.tensor([ord(name) for name in "abc"])
    assert torch.equal(ids, letters[mixture.chosen(7, 3, 16)][:, None].expand(16, T))
    assert torch.equal(ids, targets)


def test_a_batch_is_a_function_of_seed_and_step(tmp_path):
    sources = {"x": load(TEXT, tmp_path), "y": load(TEXT[::-1], tmp_path)}
    data = MixtureData(sources, {"x": 1.0, "y": 1.0}, ByteTokenizer())
    first = data.training_batch(1, 2, 8, T)
    data.training_batch(1, 3, 8, T)
    for found, again in zip(first, data.training_batch(1, 2, 8, T), strict=True):
        assert torch.equal(found, again)
    assert not torch.equal(first[0], data.training_batch(1, 3, 8, T)[0])
    assert not torch.equal(first[0], data.training_batch(2, 2, 8, T)[0])
    chosen = data.chosen(1, 2, 8)
    for number, source in enumerate(sources.values()):
        own = source.training_batch(1, 2, int((chosen == number).sum()), T)
        assert torch.equal(first[0][torch.from_numpy(chosen == number)], own[0])


def test_all_held_out_tokens_are_validated_on_text_by_text(mixture):
    batches = [*mixture.validation(4, T)]
    assert len(batches) == len(mixture.validation(4, T))
    scored = "".join(map(chr, torch.cat([targets.flatten() for _, targets in batches])))
    assert scored == "a" * 50 + "b" * 60 + "c" * 70  # a tenth of each
    rows, _ = mixture.opening(T, 3 * T)
    assert rows.tolist() == [[ord("a")] * T] * 3
    assert mixture.val_bytes == 180
    facts = mixture.facts()
    assert (facts["train_tokens"], facts["val_tokens"]) == (450 + 540 + 630, 180)
    other = MixtureData({"a": mixture.sources["a"]}, {"a": 1.0}, ByteTokenizer())
    assert other.text_hash != mixture.text_hash


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("x:{data:text,path:x.txt,weight:1}", "sources: has fewer than two texts"),
        ("x:{data:texts,weight:1}", r"sources\.x\.data: 'texts' is not in conf/data"),
        ("x:{data:recall,weight:1},y:{data:pydocs,weight:1}", r"sources\.x: is not text; a"),
        ("x:{data:pydocs,pat:1,weight:1},y:{data:pydocs,weight:1}", r"sources\.x\.pat: Py"),
        ("x:{data:pydocs,weight:-1},y:{data:pydocs}", r"sources\.x\.weight: -1 is not"),
    ],
)
def test_what_is_wrong_is_named(given, said, tmp_path):
    mixture = ["data=mixture", f"data.sources={{{given}}}", f"cache_dir={tmp_path}"]
    with pytest.raises(UserError, match=rf"^data\.{said}"):
        build_data(settings(mixture))


def test_a_vocabulary_of_one_text_and_texts_of_one_document_are_refused(tmp_path):
    specs = {name: {"source": documents([TEXT]), "weight": 1} for name in "xy"}
    with pytest.raises(ConfigError, match=r"^tokenizer: takes its vocabulary from one text, and a"):
        Mixture(specs).load(request(tmp_path, CharTokenizer()))
    said = r"^data\.mask_documents: data\.sources\.x: the text lacks two documents"
    with pytest.raises(ConfigError, match=said):
        Mixture(specs).load(request(tmp_path, mask_documents=True))
