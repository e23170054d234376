"""Tokenizers of every kind against the library they are of, and ids of 32 bits in runs."""

import json
import random
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from loading import load, read_sides, request
from support import TEXT, TRICKY, command, losses, refuses, run_folders, series, tiny
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, trainers
from tokenizers import pre_tokenizers as split
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from gptattn.data import hf_tokenizer
from gptattn.data.bin_files import BinFiles
from gptattn.data.hf_tokenizer import HuggingFaceTokenizer
from gptattn.data.text import PlainText
from gptattn.data.tokenizer import TaskIds, write_files
from gptattn.data.tokens import INDEX, TOKENS, make_tokens
from gptattn.runs.load import load_run

END = "<|endoftext|>"
# Llama 3's way of splitting a text into words.
WORDS = Regex(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@cache
def make(kind: str) -> str:
    """The tokenizer.json of a tokenizer of this kind."""
    size, special = 400, ["<|begin|>", END]
    if kind == "qwen":
        library, trainer = Tokenizer(models.BPE()), trainers.BpeTrainer
        library.normalizer = normalizers.NFC()
        by_words = split.Split(WORDS, "isolated")
        by_bytes = split.ByteLevel(add_prefix_space=False, use_regex=False)
        library.pre_tokenizer = split.Sequence([by_words, by_bytes])
        library.decoder = decoders.ByteLevel()
    elif kind == "llama2":
        library, trainer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>")), None
        library.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        library.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
        characters = sorted({*TEXT, "▁"} - {" ", "≈"})  # ≈ is written in bytes
        tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *characters]
        merges = [("T", "h"), ("Th", "e"), ("▁", "The"), ("e", "n")]
        tokens += [a + b for a, b in merges]
        library.model = models.BPE(
            {token: id for id, token in enumerate(tokens)},
            merges,
            byte_fallback=True,
            unk_token="<unk>",
        )
        library.add_special_tokens(special)
        return library.to_str()
    elif kind == "unigram":
        library, trainer = Tokenizer(models.Unigram()), trainers.UnigramTrainer
        library.pre_tokenizer, library.decoder = split.Metaspace(), decoders.Metaspace()
    else:
        library, trainer = Tokenizer(models.WordPiece(unk_token="[UNK]")), trainers.WordPieceTrainer
        library.pre_tokenizer, library.decoder = split.BertPreTokenizer(), decoders.WordPiece()
        special = ["[UNK]", *special]
    more = {"unk_token": "[UNK]"} if kind == "unigram" else {}
    alphabet = split.ByteLevel.alphabet() if kind == "qwen" else []
    given = {"vocab_size": size, "special_tokens": [*more.values(), *special]}
    given |= {"show_progress": False, "initial_alphabet": alphabet, **more}
    library.train_from_iterator([TEXT, TRICKY], trainer(**given))
    library.add_tokens(["<think>"])
    begin = [("<|begin|>", library.token_to_id("<|begin|>"))]
    library.post_processor = TemplateProcessing(single="<|begin|> $A", special_tokens=begin)
    return library.to_str()


def save(folder: Path, text: str) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(text)
    return str(folder / "tokenizer.json")


KINDS = ["qwen", "llama2", "unigram", "wordpiece"]


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_text_are_those_of_the_library_also_in_pieces(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(hf_tokenizer, "PIECE_CHARS", 3)
    ours = HuggingFaceTokenizer(save(tmp_path, make(kind)))
    theirs = Tokenizer.from_str(make(kind))
    draw = random.Random(1)
    text = TEXT + "".join(draw.choices([*TRICKY, *"  \n\n'sdt.,", "<think>"], k=2000))
    ids = theirs.encode(text, add_special_tokens=False).ids
    pieces = list(ours.cut([text[:99], text[99:]]))
    assert "".join(pieces) == text
    assert (len(pieces) > 100) == (kind != "llama2")  # which puts a space before each
    found = np.concatenate(ours.encode_batch(pieces))
    assert found.tolist() == ids
    assert found.dtype == np.uint16
    said = ours.decode(found)
    assert said.removeprefix(" ") == theirs.decode(ids, skip_special_tokens=False).removeprefix(" ")
    assert ours.byte_lengths()[found].sum() == len(said.encode())
    assert "".join(map(ours.decode, np.split(ours.encode(TEXT[:4], "x"), 1))).strip() == TEXT[:4]


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_in_a_text_stay_text_unless_asked(kind, tmp_path):
    file = save(tmp_path, make(kind))
    text = f"The {END} end.<|begin|>"
    special = {Tokenizer.from_str(make(kind)).token_to_id(token) for token in (END, "<|begin|>")}
    ours = HuggingFaceTokenizer(file)
    assert not special & {*ours.encode(text, "x").tolist()}
    asked = HuggingFaceTokenizer(file, parse_special=True)
    theirs = Tokenizer.from_str(make(kind)).encode(text, add_special_tokens=False).ids
    assert asked.encode(text, "x").tolist() == theirs
    assert special < {*theirs}
    assert ours.separator().tolist() == asked.separator().tolist()
    assert asked.fingerprint() != ours.fingerprint()


def test_a_vocabularys_special_token_stays_text_even_if_merges_are_ignored(tmp_path):
    node = json.loads(make("qwen"))
    node["model"] |= {"ignore_merges": True}
    text = "The EOT end. EOT"
    plain = HuggingFaceTokenizer(save(tmp_path / "a", json.dumps(node))).encode(text, "x")
    node["model"]["vocab"]["EOT"] = new = len(node["model"]["vocab"]) + 9
    node["added_tokens"].append(node["added_tokens"][0] | {"id": new, "content": "EOT"})
    file = save(tmp_path / "b", json.dumps(node))
    assert HuggingFaceTokenizer(file).encode("EOT" + text, "x").tolist()[-len(plain) :] == [*plain]
    assert new not in HuggingFaceTokenizer(file).encode("EOT", "x")
    assert new in HuggingFaceTokenizer(file, parse_special=True).encode("EOT", "x")


def test_a_token_that_takes_the_spaces_after_it_is_not_cut_from_them(tmp_path, monkeypatch):
    monkeypatch.setattr(hf_tokenizer, "PIECE_CHARS", 1)
    library = Tokenizer.from_str(make("qwen"))
    library.add_tokens([AddedToken("<tool>", rstrip=True)])
    ours = HuggingFaceTokenizer(save(tmp_path, library.to_str()))
    found = np.concatenate(ours.encode_batch(list(ours.cut(["The <tool>  end."]))))
    assert found.tolist() == library.encode("The <tool>  end.", add_special_tokens=False).ids


def test_a_file_without_added_tokens_is_read(tmp_path):
    node = json.loads(make("qwen"))
    del node["added_tokens"]
    assert HuggingFaceTokenizer(save(tmp_path, json.dumps(node))).end_of_text is not None


def test_a_token_ends_texts_by_its_name_or_as_the_file_says(tmp_path):
    text = make("qwen")
    library = Tokenizer.from_str(text)
    named = HuggingFaceTokenizer(save(tmp_path / "a", text), end_of_text="<|begin|>")
    assert named.separator().tolist() == [library.token_to_id("<|begin|>")]
    none = HuggingFaceTokenizer(save(tmp_path / "b", text.replace(END, "<|no end|>")))
    assert none.separator().tolist() == library.encode("\n\n", add_special_tokens=False).ids
    with refuses("tokenizer.end_of_text: '<eot>'"):
        HuggingFaceTokenizer(str(tmp_path / "a"), end_of_text="<eot>")
    with refuses("tokenizer.sha256: tokenizer.path", 3):
        HuggingFaceTokenizer(str(tmp_path / "a"), none.settings()["sha256"])
    for one in (named, none):  # transformers opens what a run keeps
        write_files(tmp_path / "kept", one.files())
        theirs = AutoTokenizer.from_pretrained(tmp_path / "kept")
        assert theirs.eos_token_id == one.end_of_text
        assert theirs(TEXT)["input_ids"][1:] == one.encode(TEXT, "x").tolist()
        assert HuggingFaceTokenizer(**one.settings()).fingerprint() == one.fingerprint()


def test_a_file_that_is_no_tokenizer_is_named(tmp_path):
    for text in ("{", "{}", make("qwen").replace('"BPE"', '"XYZ"')):
        with refuses(f"tokenizer.path: {tmp_path}", 3):
            HuggingFaceTokenizer(save(tmp_path, text))
    missing = Tokenizer(models.WordLevel({"a": 0}))
    with refuses("tokenizer.path: without an id", 3):
        HuggingFaceTokenizer(save(tmp_path, missing.to_str()))


# Ids beyond 65,535


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tokenizer whose merges and end of text have ids beyond 65,535."""
    node = json.loads(make("qwen").replace(END, "<|gone|>"))
    model = node["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    tokens[258:258] = [f"unused{i}" for i in range(2**16)]
    model["vocab"] = {token: id for id, token in enumerate(tokens)}
    node["added_tokens"] = []
    library = Tokenizer.from_str(json.dumps(node))
    library.add_special_tokens([END])
    return save(tmp_path_factory.mktemp("large"), library.to_str())


def test_ids_take_32_bits_on_disk_for_a_large_vocabulary_and_16_otherwise(large, tmp_path):
    source, ours = PlainText([TEXT, TEXT[:99]]), HuggingFaceTokenizer(large)
    sides = [*read_sides(load(source, tmp_path / "bytes"))]
    for bits, tokenizer in ((32, ours), (16, HuggingFaceTokenizer(save(tmp_path, make("qwen"))))):
        to = tmp_path / f"{bits} bits"
        make_tokens(source, to, request(tmp_path, tokenizer, tokenizer_name="hf"))
        data = load(BinFiles(str(to)), tmp_path / "b", tokenizer, mask_documents=True)
        assert [side.replace(END, "\n\n") for side in read_sides(data)] == sides
        assert (data.train.max() > 65_535) == (bits == 32)
        assert data.train.nbytes == len(data.train) * bits // 8
        assert ('"id_bits"' in (to / INDEX).read_text()) == (bits == 32)
        with refuses(f"tokenizer: tokenizer=hf 'tokenizer.path={to}'"):
            load(BinFiles(str(to)), tmp_path / "b")
        (to / TOKENS).write_bytes((to / TOKENS).read_bytes()[:-2])
        with refuses("data.path: damaged", 3):
            load(BinFiles(str(to)), tmp_path / "b", tokenizer)


def test_files_of_32_bit_ids_are_read_with_and_without_a_header(tmp_path):
    ids = np.random.default_rng(0).integers(0, 128_256, 1_000).astype("<u4")
    ids[:10] = 128_255
    plain, shard = tmp_path / "plain.bin", tmp_path / "shard.bin"
    ids.tofile(plain)
    header = np.zeros(256, dtype="<i4")  # as llm.c writes it for Llama 3
    header[:3] = 20240801, 7, len(ids)
    shard.write_bytes(header.tobytes() + ids.tobytes())
    for file in (plain, shard):
        data = load(BinFiles(str(file)), tmp_path / "c", TaskIds(128_256))
        assert [*data.train, *data.val[1:]] == ids.tolist()
    with refuses("tokenizer: 128,255 (read as 32-bit"):
        load(BinFiles(str(plain)), tmp_path / "c", TaskIds(128_255))
    plain.write_bytes(ids.tobytes()[:-2])
    with refuses("data.path: as 32-bit ids", 3):
        load(BinFiles(str(plain)), tmp_path / "c", TaskIds(128_256))


@pytest.mark.slow
def test_a_large_vocabulary_run_trains_resumes_evaluates_and_generates(large, tmp_path, call):
    given = ("tokenizer=hf", f"tokenizer.path={large}", "model.d_model=8", "model.num_heads=2")
    assert command(tmp_path, *tiny(tmp_path, *given, "budget.steps=2")) == 0
    (run,) = run_folders(tmp_path)
    assert series(run, "val/bits_per_byte")
    assert command(tmp_path, f"resume='{run}'", "budget.steps=3") == 0
    assert losses(run)[-1][0] == 3
    saved = load_run(run)
    assert saved.model.vocab_size == saved.tokenizer.vocab_size > 65_536
    code, out, err = call("evaluate", f"run={run}")
    assert (code, err) == (0, ""), out
    code, out, _ = call("generate", f"run={run}", "prompt=Line", "tokens=3", "temperature=0")
    assert code == 0
    assert out.startswith("Line")
