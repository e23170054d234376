"""Token ids from existing files: prepared texts, nanoGPT's files, modded-nanogpt's shards.

A shard is 256 int32 numbers, of which the first three are 20240520, 1 and the number of ids, and
then the ids in 16 bits each. Source: github.com/KellerJordan/modded-nanogpt, data/fineweb.py.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gptattn.data.run_data import Request
from gptattn.data.text import expand_home, find_files, find_sides
from gptattn.data.tokenizer import FOLDER
from gptattn.data.tokens import (
    INDEX,
    PIECE_TOKENS,
    TOKEN_DTYPE,
    TokenData,
    TokenSource,
    TokenWriter,
    map_ids,
    read_index,
    stamp_file,
)
from gptattn.errors import ConfigError, DataError
from gptattn.machine.read_progress import show_progress

MAGIC, VERSION = 20240520, 1
HEADER_BYTES = 256 * 4
HELD_OUT = re.compile(r"(^|[_.-])(train)?val")  # also trainval, but not interval_train_1


class BinFiles(TokenSource):
    """Ids of 16 bits: a prepared folder, or files of other projects.

    `path` is a prepared folder; or one with `*train*.bin` and perhaps `val*.bin` or `*_val*.bin`,
    as nanoGPT and modded-nanogpt write them; or one such file. Without a held-out file, and without
    `val_path`, the end of the ids is held out. A document begins at each end of text. Raises
    DataError, naming the file, for what is missing, damaged, or no file of ids.
    """

    def __init__(self, path: str, val_path: str | None = None) -> None:
        self.path, self.val_path = path, val_path
        self.name, self.root = path, expand_home(path, "data.path")

    def load(self, request: Request) -> TokenData:
        if not (self.root / INDEX).is_file():
            return super().load(request)
        if self.val_path:
            raise DataError("data.val_path", f"{self.root} has its own held-out part; leave it out")
        index, tokenizer = read_index(self.root), request.tokenizer
        tokenizer.restore(index.settings, self.root)
        if not tokenizer.ready or tokenizer.fingerprint() != index.tokenizer:
            words = choose_tokenizer(index.choice, self.root)
            raise ConfigError("tokenizer", f"is not that of the ids; give {words}")
        return TokenData(self.root, index, request)

    def stamp(self) -> str:
        return str([[stamp_file(file) for file in side] for side in self._find_files()])

    def _find_files(self) -> tuple[list[Path], list[Path]]:
        """Return the files to train on, and those to hold out, perhaps none."""
        train, held_out = find_sides(self.path, self.val_path, "*train*.bin", "*.bin")
        if self.val_path is None and self.root.is_dir():
            files = find_files(self.path, "*.bin", "data.path")
            held_out = [file for file in files if HELD_OUT.search(file.stem)]
        return [file for file in train if file not in held_out], held_out

    def write_tokens(self, request: Request, train: TokenWriter, val: TokenWriter) -> str:
        train_files, val_files = self._find_files()
        shards = [read_header(file, "data.path") for file in train_files]
        to_train_on = sum(shard.count for shard in shards)
        if val_files:
            shards += [read_header(file, "data.val_path") for file in val_files]
            val.context = 1
        else:
            to_train_on -= max(1, round(to_train_on * request.val_fraction))
        tokenizer, highest, digests = request.tokenizer, 0, []
        size = sum(shard.count for shard in shards) * TOKEN_DTYPE.itemsize
        with show_progress(f"data: reading {self.name}", size) as advance:
            for shard in shards:
                ids, digest = map_ids(shard.path, shard.offset), hashlib.sha256()
                for start in range(0, len(ids), PIECE_TOKENS):
                    piece = ids[start : start + PIECE_TOKENS]
                    digest.update(piece.data)
                    highest = max(highest, int(piece.max()))
                    cut = to_train_on - train.tokens
                    for writer, part in ((train, piece[:cut]), (val, piece[cut:])):
                        # Without an end of text, which is None then, no document is found.
                        writer.write(part, np.flatnonzero(part == tokenizer.end_of_text))
                    advance(piece.nbytes)
                digests.append(digest.hexdigest())
        if not tokenizer.ready or highest >= tokenizer.vocab_size:
            raise ConfigError(
                "tokenizer",
                f"did not make the ids up to {highest:,}; give the one that did, such as "
                "tokenizer=gpt2 tokenizer.path=FOLDER, or without its files tokenizer=none "
                f"tokenizer.vocab_size={highest + 1} (GPT-2 has 50257) sample.tokens=0",
            )
        sides = digests[: len(train_files)], digests[len(train_files) :]
        return hashlib.sha256("\n".join(map(json.dumps, sides)).encode()).hexdigest()


class Shard(NamedTuple):
    """A file of `count` ids from byte `offset` on."""

    path: Path
    offset: int
    count: int


def read_header(path: Path, field: str) -> Shard:
    """Return where a file's ids are, with or without a header.

    Raises DataError, naming `field`, for what cannot be a file of 16-bit ids.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            opening = np.frombuffer(file.read(12).ljust(12, b"\0"), dtype="<i4")
    except OSError as error:
        raise DataError(field, f"{path} cannot be read ({error.strerror})") from None
    if opening[0] != MAGIC:
        if size % TOKEN_DTYPE.itemsize:
            raise DataError(field, f"{path} has {size:,} bytes, so it holds no 16-bit ids")
        return Shard(path, 0, size // TOKEN_DTYPE.itemsize)
    version, count = map(int, opening[1:])
    if version != VERSION or size != HEADER_BYTES + TOKEN_DTYPE.itemsize * count:
        what = f"version {version} and {size:,} bytes for {count:,} ids"
        raise DataError(field, f"{path} is no whole shard of version {VERSION}: it has {what}")
    return Shard(path, HEADER_BYTES, count)


def choose_tokenizer(choice: str, root: Path) -> str:
    """Return the settings that choose the tokenizer which made the ids in a folder."""
    # gpt2 reads any byte-level BPE, also one that tokenizer=bpe has trained.
    own = (root / FOLDER).is_dir()
    return f"tokenizer=gpt2 tokenizer.path={root}" if own else f"tokenizer={choice}"
