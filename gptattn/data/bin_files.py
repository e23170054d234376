"""Token ids from existing files: prepared texts, nanoGPT's files, modded-nanogpt's shards.

A shard has a header of 256 int32 numbers, which begins with 20240520, 1 and the number of ids, then
16 bits per id. Source: github.com/KellerJordan/modded-nanogpt, data/fineweb.py. llm.c's shards for
Llama 3 begin with 20240801 and 7 and have 32 bits per id (dev/data/data_common.py).
"""

import hashlib
import json
import re
import shlex
from pathlib import Path

import numpy as np

from gptattn.data.hub import name_errors
from gptattn.data.run_data import Request
from gptattn.data.text import find_files, find_sides
from gptattn.data.tokenizer import FOLDER, Ids, id_type
from gptattn.data.tokens import (
    INDEX,
    PIECE_TOKENS,
    Index,
    TokenData,
    TokenSource,
    TokenWriter,
    map_ids,
    read_index,
    stamp_file,
)
from gptattn.errors import ConfigError, DataError
from gptattn.machine.disk import expand_path
from gptattn.machine.read_progress import show_progress

MAGIC = {(20240520).to_bytes(4, "little"): 16, (20240801).to_bytes(4, "little"): 32}  # -> bits
HEADER = 1024  # bytes
OTHERS = {  # how a file of another format begins -> what it is
    rb"\x93NUMPY": "a NumPy file",
    rb".{4}\0{4}\{": "safetensors",  # after the length of its header
    rb"PAR1": "Parquet (data=hf)",
    rb"PK\x03\x04|\x80[\x04\x05]\x95|SQLite format 3": "a zip file, a pickle or a database",
    rb"\x1f\x8b\x08": "gzip",
    rb"([\t-\r -~]|[\xc2-\xf4][\x80-\xbf]{1,3}){64}": "text (data=text, or data=hf for JSON)",
}
HELD_OUT = re.compile(r"(^|[_.-])(train)?val")  # also trainval, but not interval_train_1


class BinFiles(TokenSource):
    """Ids of 16 or 32 bits: a prepared folder, or files of other projects.

    `path` is a prepared folder; or a folder with `*train*.bin` and perhaps `val*.bin` or
    `*_val*.bin`, as nanoGPT and modded-nanogpt write them; or one such file. Without a held-out
    file or `val_path`, the end of the ids is held out. A document begins at each end of text.
    Raises DataError, naming the file, if one is missing, damaged or has no ids.
    """

    def __init__(self, path: str, val_path: str | None = None) -> None:
        self.path, self.val_path = path, val_path
        self.name, self.root = path, expand_path(path, "data.path")

    def load(self, request: Request) -> TokenData:
        if not (self.root / INDEX).is_file():
            return super().load(request)
        if self.val_path:
            raise DataError("data.val_path", f"{self.root} has a held-out part; leave this out")
        index, tokenizer = read_index(self.root), request.tokenizer
        tokenizer.restore(index.settings, self.root)
        if not tokenizer.ready or tokenizer.fingerprint() != index.tokenizer:
            words = choose_tokenizer(index, self.root)
            raise ConfigError("tokenizer", f"did not make these ids; give {words}")
        return TokenData(self.root, index, request)

    def stamp(self) -> str:
        return str([[stamp_file(file) for file in side] for side in self._find_files()])

    def _find_files(self) -> tuple[list[Path], list[Path]]:
        """Return the files to train on, and those to hold out, if any."""
        train, held_out = find_sides(self.path, self.val_path, "*train*.bin", "*.bin")
        if self.val_path is None and self.root.is_dir():
            files = find_files(self.path, "*.bin", "data.path")
            held_out = [file for file in files if HELD_OUT.search(file.stem)]
        return [file for file in train if file not in held_out], held_out

    def write_tokens(self, request: Request, train: TokenWriter, val: TokenWriter) -> str:
        train_files, val_files = self._find_files()
        bits = id_type(request.tokenizer.vocab_size).itemsize * 8
        found = [read_ids(file, "data.path", bits) for file in train_files]
        to_train_on = sum(map(len, found))
        if val_files:
            found += [read_ids(file, "data.val_path", bits) for file in val_files]
            val.context = 1
        else:
            to_train_on -= max(1, round(to_train_on * request.val_fraction))
        tokenizer, highest, digests = request.tokenizer, 0, []
        nbytes = sum(ids.nbytes for ids in found)
        with show_progress(f"data: reading {self.name}", nbytes) as advance:
            for ids in found:
                digest = hashlib.sha256()
                for start in range(0, len(ids), PIECE_TOKENS):
                    piece = ids[start : start + PIECE_TOKENS]
                    digest.update(piece.data)
                    highest = max(highest, int(piece.max()))
                    cut = to_train_on - train.tokens
                    for writer, part in ((train, piece[:cut]), (val, piece[cut:])):
                        # Without an end of text (None), this finds no documents.
                        writer.write(part, np.flatnonzero(part == tokenizer.end_of_text))
                    advance(piece.nbytes)
                digests.append(digest.hexdigest())
        if not tokenizer.ready or highest >= tokenizer.vocab_size:
            raise ConfigError(
                "tokenizer",
                f"cannot have made ids up to {highest:,} (read as {bits}-bit, as its vocabulary "
                "needs, if the file has no header); give the tokenizer that made them, such "
                "as tokenizer=gpt2 tokenizer.path=FOLDER, or, without its files, tokenizer=none "
                f"tokenizer.vocab_size={highest + 1} (GPT-2 has 50257) sample.tokens=0",
            )
        sides = digests[: len(train_files)], digests[len(train_files) :]
        return hashlib.sha256("\n".join(map(json.dumps, sides)).encode()).hexdigest()


def read_ids(path: Path, field: str, bits: int) -> Ids:
    """Return a file's ids, without a shard's header, which tells how many bits they have.

    `bits`: if there is no header. Raises DataError, naming `field`, if it cannot be a file of ids.
    """
    needed = f"give ids as numpy's ids.astype('uint{bits}').tofile(FILE) writes them"
    with name_errors(DataError, field, f"{path}, as {bits}-bit ids,", needed):
        with path.open("rb") as file:
            head = file.read(256)
        for start, what in OTHERS.items():
            if re.match(start, head, re.DOTALL):
                raise DataError(field, f"{path} is {what}, not {bits}-bit ids; {needed}")
        own = MAGIC.get(head[:4])
        ids = map_ids(path, own or bits)  # refuses a number of bytes that ids cannot have
    if own is None:
        return ids
    ids = ids[HEADER * 8 // own :]
    if len(ids) != int.from_bytes(head[8:12], "little"):
        raise DataError(field, f"{path} is an incomplete shard; make it again")
    return ids


def choose_tokenizer(index: Index, root: Path) -> str:
    """Return the settings that choose the tokenizer that made a folder's ids."""
    if not (root / FOLDER).is_dir():
        return f"tokenizer={index.choice}"
    # gpt2 reads any byte-level BPE, including one that tokenizer=bpe has trained.
    choice = "gpt2" if index.choice == "bpe" else index.choice
    own = {key: index.settings.get(key) for key in ("end_of_text", "parse_special")}
    more = [f"tokenizer.{key}={json.dumps(value)}" for key, value in own.items() if value]
    return shlex.join([f"tokenizer={choice}", f"tokenizer.path={root}", *more])
