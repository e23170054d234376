"""Measures how fast scripts/prepare.py encodes text, and with how much memory.

`python scripts/bench_prepare.py [--megabytes 256] [--rounds 3] [--only byte]` writes a text of that
size (Python's standard library, over and over) and encodes it with the byte tokenizer and with a
BPE of 16,384 ids, as a user would, and with the BPE by the tokenizer library alone: its own batch
call on its own threads, nothing written. The order is random in each round. Prints medians, their
spread and the memory of all processes together. The last line is JSON.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from statistics import median

from gptattn.data.text import StandardLibrary
from gptattn.machine.cpus import usable_cpus

COMMAND = (sys.executable, str(Path(__file__).parent / "prepare.py"))
VOCABULARY = 16_384
PIECE, BATCH = 2**14, 1024  # characters at a time, and pieces in a call of the library
POLL_SECONDS = 0.1


def write_text(file: Path, size: int) -> None:
    """Write `size` bytes of text, or a few more."""
    sources = ["".join(document()) for document in StandardLibrary().train]
    with file.open("w", encoding="utf-8") as out:
        written = 0
        for source in cycle(sources):
            written += out.write(source)
            if written >= size:
                return


def train_bpe(folder: Path) -> None:
    """Train the BPE on the standard library, as GPT-2's was trained."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    texts = (piece for document in StandardLibrary().train for piece in document())
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))


def prepared(text: Path, tokenizer: list[str], workers: int) -> tuple[float, float]:
    """Encode the text by scripts/prepare.py; return the seconds and the most megabytes held."""
    to = text.parent / "to"
    shutil.rmtree(to, ignore_errors=True)
    words = [f"to={to}", "data=text", f"data.path={text}", *tokenizer]
    begun, most = time.perf_counter(), 0.0
    with subprocess.Popen([*COMMAND, *words], stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            most = max(most, sum(map(megabytes, family(process.pid))))
            time.sleep(POLL_SECONDS)
    if process.returncode:
        raise SystemExit(process.returncode)
    return time.perf_counter() - begun, most


def by_library(text: Path, folder: Path) -> float:
    """Encode the text by the library's batch call; return the seconds, without reading the file."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    content = text.read_text(encoding="utf-8")
    pieces = [content[i : i + PIECE] for i in range(0, len(content), PIECE)]
    begun = time.perf_counter()
    for start in range(0, len(pieces), BATCH):
        tokenizer.encode_batch_fast(pieces[start : start + BATCH], add_special_tokens=False)
    return time.perf_counter() - begun


def family(root: int) -> list[int]:
    """Return a process and all that come from it."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue  # it has ended
    found = [root]
    for process in found:
        found += [child for child, parent in parents.items() if parent == process]
    return found


def megabytes(process: int) -> float:
    """Return what a process holds, of shared pages its share."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1000
    except (OSError, StopIteration):
        return 0.0


def main() -> None:
    """Measure, and print the rates, their spread and the ratio."""
    parser = argparse.ArgumentParser(description="Measure scripts/prepare.py.")
    parser.add_argument("--megabytes", type=int, default=256, help="of text; %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="%(default)s")
    parser.add_argument("--workers", type=int, default=usable_cpus(), help="%(default)s")
    parser.add_argument("--only", choices=("byte", "bpe", "library"), help="one of the three")
    args = parser.parse_args()
    if "TOKENIZERS_PARALLELISM" in os.environ:
        raise SystemExit("unset TOKENIZERS_PARALLELISM: the library is measured on all cores")
    with tempfile.TemporaryDirectory() as folder:
        text, bpe = Path(folder) / "text.txt", Path(folder) / "bpe"
        write_text(text, args.megabytes * 10**6)
        train_bpe(bpe)
        gpt2 = ["tokenizer=gpt2", f"tokenizer.path={bpe}"]
        ways: dict[str, Callable[[], tuple[float, float]]] = {
            "byte": lambda: prepared(text, ["tokenizer=byte"], args.workers),
            "bpe": lambda: prepared(text, gpt2, args.workers),
            "library": lambda: (by_library(text, bpe), 0.0),
        }
        if args.only:
            ways = {args.only: ways[args.only]}
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for _ in range(args.rounds):
            for name in random.sample(list(ways), len(ways)):
                found[name].append(ways[name]())
        size = text.stat().st_size / 1e6
    cores = min(args.workers, usable_cpus())
    print(f"{size:.0f} MB, {args.workers} processes on {usable_cpus()} cores")
    result: dict[str, object] = {"megabytes": round(size), "workers": args.workers}
    for name, runs in found.items():
        seconds = [seconds for seconds, _ in runs]
        rate = size / median(seconds)
        spread = f"{min(seconds):.1f} to {max(seconds):.1f} s"
        held = f", {max(most for _, most in runs):.0f} MB held" if name != "library" else ""
        print(f"{name}: {rate:.1f} MB/s, {rate / cores:.1f} per core ({spread}){held}")
        result[name] = {"seconds": seconds, "megabytes_held": max(most for _, most in runs)}
    if len(found) == 3:
        times = {name: median(seconds for seconds, _ in runs) for name, runs in found.items()}
        print(f"bpe / library: {times['bpe'] / times['library']:.2f} times as long")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
