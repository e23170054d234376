"""GPT-2's tokenizer, against transformers and by hand; its files, however they are damaged."""

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from support import TEXT, TRICKY, bpe
from transformers import AutoTokenizer
from transformers import GPT2Tokenizer as Theirs

from gptattn.data.bpe import ByteLevelBPE, byte_characters, cut_between_words
from gptattn.data.tokenizer_files import FORMS
from gptattn.errors import DataError, UserError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bpe(tmp_path_factory.mktemp("bpe"))


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Theirs:
    return Theirs(str(folder / "vocab.json"), str(folder / "merges.txt"))


def hand_made(folder: Path, merges: list[str], **more: int) -> Path:
    """Write GPT-2's two files: bytes as ids 0 to 255, then the tokens that the merges make."""
    tokens = byte_characters() + [merge.replace(" ", "") for merge in merges]
    vocab = {token: id for id, token in enumerate(tokens)} | more
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "encoder.json").write_text(json.dumps(vocab))
    (folder / "vocab.bpe").write_text("\n".join(["#version: 0.2", *merges, ""]), encoding="utf-8")
    return folder


def test_merges_apply_in_their_order_and_within_words(tmp_path: Path) -> None:
    # 256 "ab", 257 " ab" (a space is written Ġ), 258 "bc": of "abc" the first merge leaves ab, c.
    tokenizer = ByteLevelBPE(str(hand_made(tmp_path, ["a b", "Ġ ab", "b c"])))
    assert tokenizer.vocab_size == 259
    text, ids = "abc ab  ab\nbc", [256, 99, 257, 32, 257, 10, 258]
    assert tokenizer.encode(text, "data").tolist() == ids
    assert tokenizer.decode(np.array(ids)) == text
    assert tokenizer.byte_lengths()[[0, 32, 255, 256, 257, 258]].tolist() == [1, 1, 1, 2, 3, 2]


def test_ids_are_those_of_transformers_from_every_form_of_file(
    folder: Path, theirs: Theirs, tmp_path: Path
) -> None:
    expected = theirs(TRICKY + TEXT)["input_ids"]
    for number, form in enumerate(FORMS):
        home = tmp_path / str(number)
        home.mkdir()
        for name, source in zip(form, (folder / n for n in form), strict=True):
            own = {"encoder.json": "vocab.json", "vocab.bpe": "merges.txt"}.get(name, name)
            shutil.copy(source.with_name(own), home / name)
        tokenizer = ByteLevelBPE(str(home))
        assert tokenizer.encode(TRICKY + TEXT, "data").tolist() == expected
        assert tokenizer.vocab_size == len(theirs) == 400
        assert tokenizer.fingerprint() == ByteLevelBPE(str(folder)).fingerprint()


@pytest.mark.parametrize("length", [1, 2, 3, 7, 50])
def test_a_text_in_pieces_has_the_ids_of_the_whole(
    length: int, folder: Path, theirs: Theirs
) -> None:
    draw = random.Random(length)
    alphabet = [*TRICKY, *"  \n\n'sdt", "'re", "  ", "<|endoftext|>"]
    text = "".join(draw.choices(alphabet, k=3000))
    pieces = list(cut_between_words([text], length))
    assert len(pieces) > 20
    found = np.concatenate(ByteLevelBPE(str(folder)).encode_batch(pieces))
    assert found.tolist() == theirs(text, split_special_tokens=True)["input_ids"]
    # However the text comes, it is cut at the same places.
    for part in (1, 10, 1000):
        parts = [text[i : i + part] for i in range(0, len(text), part)]
        assert list(cut_between_words(parts, length)) == pieces


def test_a_text_without_a_place_to_cut_is_one_piece() -> None:
    assert list(cut_between_words(["x" * 100 + "\t" * 9], 10)) == ["x" * 100 + "\t" * 9]
    assert list(cut_between_words(["abc de fgh i"], 2)) == ["abc", " de", " fgh", " i"]
    assert list(cut_between_words([""], 2)) == [""]


def test_the_end_of_text_is_ordinary_text_to_encode_and_one_token_to_decode(
    folder: Path, theirs: Theirs
) -> None:
    tokenizer, end = ByteLevelBPE(str(folder)), theirs.eos_token_id
    ids = tokenizer.encode("a<|endoftext|>b", "data")
    assert end not in ids
    assert tokenizer.decode(ids) == "a<|endoftext|>b"
    assert tokenizer.decode(np.array([end])) == "<|endoftext|>"
    assert tokenizer.byte_lengths()[end] == len("<|endoftext|>")


def test_decoding_is_that_of_transformers_and_half_a_character_is_u_fffd(
    folder: Path, theirs: Theirs
) -> None:
    tokenizer = ByteLevelBPE(str(folder))
    ids = tokenizer.encode(TRICKY, "data")
    assert tokenizer.decode(ids) == TRICKY
    assert tokenizer.byte_lengths()[ids].sum() == len(TRICKY.encode())
    for start in range(0, len(ids), 3):
        part = ids[start : start + 4]
        assert tokenizer.decode(part) == theirs.decode(part, clean_up_tokenization_spaces=False)
    smile = tokenizer.encode("😀", "data")  # not in the training text: bytes
    assert len(smile) > 1
    assert set(tokenizer.decode(smile[:-1])) == {"\ufffd"}


def test_special_tokens_stand_for_their_text_and_survive_being_kept(tmp_path: Path) -> None:
    source = hand_made(tmp_path / "a", ["a b"], **{"<ü x>": 257})
    tokenizer = ByteLevelBPE(str(source))
    assert tokenizer.byte_lengths()[257] == 6
    assert tokenizer.decode(np.array([256, 257])) == "ab<ü x>"
    (tmp_path / "b").mkdir()
    for name, text in tokenizer.files().items():
        (tmp_path / "b" / name).write_text(text, encoding="utf-8")
    assert ByteLevelBPE(str(tmp_path / "b")).fingerprint() == tokenizer.fingerprint()
    opened = AutoTokenizer.from_pretrained(tmp_path / "b")
    assert len(opened) == 258
    assert opened("ab<ü x>c")["input_ids"] == [256, 257, 99]


def test_a_prompt_that_is_not_unicode_is_the_users_mistake(folder: Path) -> None:
    with pytest.raises(DataError, match=r"prompt: cannot be written as UTF-8 at offset 2"):
        ByteLevelBPE(str(folder)).encode("ab\udcff", "prompt")


def test_the_fingerprint_is_of_the_content(folder: Path, tmp_path: Path) -> None:
    one = ByteLevelBPE(str(hand_made(tmp_path / "a", ["a b", "b c"])))
    moved = ByteLevelBPE(str(hand_made(tmp_path / "b", ["a b", "b c"])))
    # The same tokens, but the merges in another order.
    ids = {"ab": 256, "bc": 257}
    other = ByteLevelBPE(str(hand_made(tmp_path / "c", ["b c", "a b"], **ids)))
    assert one.fingerprint() == moved.fingerprint() != other.fingerprint()
    assert one.encode("abc", "data").tolist() == [256, 99]
    assert other.encode("abc", "data").tolist() == [97, 257]


def test_settings_make_the_same_tokenizer_and_no_other(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folder, tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    settings = ByteLevelBPE("mine").settings()
    assert settings["path"] == str(tmp_path / "mine")
    monkeypatch.chdir("/")
    assert ByteLevelBPE(**settings).settings() == settings
    shutil.rmtree(tmp_path / "mine")
    with pytest.raises(
        DataError, match=r"tokenizer.path: .*mine is not a folder; give a folder with GPT-2's"
    ):
        ByteLevelBPE(**settings)
    hand_made(tmp_path / "mine", ["a b"])
    with pytest.raises(DataError, match=r"tokenizer.sha256: .*mine has other tokens"):
        ByteLevelBPE(**settings)


# Each takes tokenizer.json's content as text and as a tree, and gives other content.
DAMAGE = {
    "cut short": (lambda text, node: text[: len(text) // 2], "cannot be used"),
    "brackets alone": (lambda text, node: "[" * 100_000, "cannot be used"),
    "word pieces": (
        lambda text, node: (
            node
            | {"added_tokens": [], "model": {"type": "WordLevel", "vocab": {}, "unk_token": "u"}}
        ),
        "not a byte-level BPE",
    ),
    "prefix": (lambda text, node: part(node, "pre_tokenizer", add_prefix_space=True), "not a byte"),
    "no merges": (lambda text, node: part(node, "model", merges=None), "cannot be used"),
    "unknown merge": (lambda text, node: part(node, "model", merges=["q q"]), "out of vocabulary"),
    "text as id": (lambda text, node: vocab(node, a="1"), "cannot be used"),
    "twice": (lambda text, node: vocab(node, more=5), "the ids of its 401 tokens are not 0 to 400"),
    "gap": (lambda text, node: vocab(node, more=500), "tokens are not 0 to 400"),
    "too many": (
        lambda text, node: vocab(node, **{f"t{i}": 400 + i for i in range(2**16)}),
        "65,936 tokens, more than 65,536",
    ),
    "byte missing": (
        lambda text, node: (
            node
            | {"added_tokens": []}
            | {"model": node["model"] | {"merges": [], "vocab": {"a": 0, "b": 1}}}
        ),
        "no token for byte 0x00",
    ),
    "half a pair": (lambda text, node: vocab(node, **{"\ud800": 400}), "cannot be used"),
}


def part(node: dict, name: str, **changes: object) -> dict:
    return node | {name: node[name] | changes}


def vocab(node: dict, **changes: object) -> dict:
    return part(node, "model", vocab=node["model"]["vocab"] | changes)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_named_in_one_line(damage: str, folder: Path, tmp_path: Path) -> None:
    change, said = DAMAGE[damage]
    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    content = change(text, json.loads(text))
    file = tmp_path / "tokenizer.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(DataError, match=said) as error:
        ByteLevelBPE(str(tmp_path))
    assert str(file) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("vocab.json", b"{}"),
        ("vocab.json", b'{"a": 0'),
        ("merges.txt", b"#version: 0.2\na b c\n"),
        ("merges.txt", b"\xff\xfe"),
    ],
)
def test_damage_in_one_of_two_files_names_both(
    name: str, content: bytes, folder: Path, tmp_path: Path
) -> None:
    for file in ("vocab.json", "merges.txt"):
        shutil.copy(folder / file, tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=r"vocab\.json with .*merges\.txt cannot be used \("):
        ByteLevelBPE(str(tmp_path))


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (None, "is not set; give a folder with GPT-2's tokenizer files, or set init_from"),
        (".", "has no tokenizer.json, no vocab.json with merges.txt, "),
        ("/dev/null", "is not a folder"),
        ("nowhere", "nowhere is not a folder"),
        ("~nobody-here/x", "cannot be used"),
    ],
)
def test_what_has_no_tokenizer_is_the_users_mistake(
    path: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(UserError, match=rf"^tokenizer\.path: .*{said}"):
        ByteLevelBPE(path)
