"""A BPE that is trained on the training part of the text."""

from pathlib import Path

import pytest
from loading import documents, load
from support import TEXT, TRICKY
from transformers import AutoTokenizer

from gptattn.data.bpe import ByteLevelBPE
from gptattn.data.text import PlainText
from gptattn.errors import ConfigError


def learned(tokenizer: ByteLevelBPE) -> list[tuple[str, str]]:
    return [(first, second) for first, second in tokenizer._merges]


# Each holds out "zqzq", which is a merge at once where it is seen, of a text without it.
@pytest.mark.parametrize(
    "source",
    [
        documents([TEXT + "zqzq " * 40, TEXT + "zqzq " * 40]),
        documents([TEXT, TEXT[:500]], ["zqzq " * 40, TEXT + "zqzq"]),
    ],
    ids=["tails", "documents"],
)
def test_nothing_is_learned_from_held_out_text(source: PlainText, tmp_path: Path) -> None:
    tokenizer = ByteLevelBPE(vocab_size=300)
    data = load(source, tmp_path, tokenizer)
    assert "zqzq" in tokenizer.decode(data.val[1:])
    assert not any("z" in a + b or "q" in a + b for a, b in learned(tokenizer))


def test_ids_are_in_gpt2s_order_and_transformers_reads_the_files(tmp_path: Path) -> None:
    tokenizer = ByteLevelBPE(vocab_size=380)
    data = load(TEXT * 2, tmp_path / "cache", tokenizer)
    lengths = tokenizer.byte_lengths()
    assert len(lengths) == tokenizer.vocab_size == 380
    assert (lengths[:256] == 1).all()
    assert (lengths[256:] > 1).all()
    assert tokenizer.separator().tolist() == [379]
    for name, text in tokenizer.files().items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.eos_token_id == 379
    assert theirs(TRICKY)["input_ids"] == tokenizer.encode(TRICKY, "data").tolist()
    assert tokenizer.decode(tokenizer.encode(TRICKY, "data")) == TRICKY
    # Both read it back, and a recorded hash is checked.
    again = ByteLevelBPE(str(tmp_path), tokenizer.settings()["sha256"], 380)
    as_gpt2 = ByteLevelBPE(str(tmp_path))
    assert again.fingerprint() == as_gpt2.fingerprint() == tokenizer.fingerprint()
    assert load(TEXT * 2, tmp_path / "cache", again).train[:].tolist() == data.train[:].tolist()


@pytest.mark.parametrize("size", [256, 65_537])
def test_a_size_that_cannot_be_is_refused(size: int) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.vocab_size: .* give 257 .* to 65,536"):
        ByteLevelBPE(vocab_size=size)


def test_a_text_too_small_for_the_size_says_how_many_it_gives(tmp_path: Path) -> None:
    text = "ab abc abc ab\nabc" + " " * 4  # the tail is two spaces
    said = r"tokenizer\.vocab_size: 261 is more than this text can give; give at most 260, or"
    with pytest.raises(ConfigError, match=said):
        load(text, tmp_path / "cache", ByteLevelBPE(vocab_size=261))
    tokenizer = ByteLevelBPE(vocab_size=260)
    load(text, tmp_path / "cache", tokenizer)
    assert tokenizer.vocab_size == 260
