"""Runs with different tokenizers are compared in bits per byte, if these are of the same bytes."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from reporting import compared
from runfolders import write_run

from gptattn.compare.comparison import Across
from gptattn.compare.table import tables_across
from gptattn.compare.verdicts import across_notes, across_words
from gptattn.errors import ConfigError

TARGETS = {"byte": "x.ByteTokenizer", "bpe": "x.TrainedBPE"}
TOKENS = {"byte": 700, "bpe": 200}
BITS = {
    "byte": {"mha": [2.00, 2.03, 2.01], "gqa": [2.10, 2.13, 2.12]},
    "bpe": {"mha": [1.80, 1.84, 1.80], "gqa": [1.85, 1.90, 1.88]},
}


def write(
    folder: Path, tokenizer: str, variants: Mapping[str, Sequence[float]], **data: Any
) -> None:
    """Write a run for each value, in bits per byte, of 700 held-out bytes; seeds count from 1."""
    own = {"tokenizer": tokenizer, "val_tokens": TOKENS[tokenizer], "val_bytes": 700, **data}
    for variant, values in variants.items():
        for seed, bits in enumerate(values, start=1):
            loss = bits * math.log(2) * 700 / TOKENS[tokenizer]
            spec = {"_target_": TARGETS[tokenizer]}
            config = {"choices": {"attn": variant, "tokenizer": tokenizer}, "tokenizer": spec}
            name = f"{variant}_{tokenizer}_{seed}"
            metrics = {"val/bits_per_byte": bits, "cost/params": 10_000 / TOKENS[tokenizer]}
            write_run(folder / name, variant, seed, loss, data=own, config=config, metrics=metrics)


def write_both(folder: Path, *variants: str) -> Path:
    for tokenizer, found in BITS.items():
        write(folder, tokenizer, {name: found[name] for name in variants or found})
    return folder


def only(folder: Path) -> Across:
    (found,) = compared(folder).across
    return found


def test_two_tokenizers_are_compared_in_bits_per_byte(tmp_path: Path) -> None:
    found = only(write_both(tmp_path, "mha"))
    assert (found.first, found.second) == ("tokenizer=byte", "tokenizer=bpe")
    mha = found.losses["mha"]
    assert (mha.first, mha.second) == (pytest.approx(6.04 / 3), pytest.approx(5.44 / 3))
    # -0.20, -0.19, -0.21: mean -0.20, deviation 0.01. One comparison: t(0.975, 2) = 4.3027.
    half = 4.3027 * 0.01 / 3**0.5
    assert mha.difference.interval == pytest.approx((-0.20 - half, -0.20 + half), abs=1e-5)
    assert mha.difference.shown
    assert found.gaps == {}
    assert across_words(found) == [
        "with tokenizer=bpe instead of tokenizer=byte, the loss in bits per byte is lower for mha."
    ]
    assert across_notes(found) == [
        "a token is 1.00 bytes of the held-out text with tokenizer=byte and 3.50 with "
        "tokenizer=bpe: equal steps are not equal text, nor equal time"
    ]
    (table,) = tables_across(compared(tmp_path))
    assert table.caption.startswith("mean bits per byte over the n seeds in common; ")
    assert [row[:5] for row in table.cells] == [
        ["variant", "n", "tokenizer=byte", "tokenizer=bpe", "change"],
        ["mha", "3", "2.0133", "1.8133", "-0.2000"],
    ]


@pytest.mark.parametrize("other", [{"val_bytes": 699}, {"text_sha256": "zzz"}])
def test_runs_with_other_held_out_bytes_are_refused_and_never_compared(
    other: dict[str, Any], tmp_path: Path
) -> None:
    write(tmp_path, "byte", {"mha": BITS["byte"]["mha"]})
    write(tmp_path, "bpe", {"mha": BITS["bpe"]["mha"]}, **other)
    with pytest.raises(ConfigError, match=r"the runs differ in data \(text .* validation bytes: 3"):
        compared(tmp_path)
    found = compared(tmp_path, split=True)
    assert (len(found.sections), found.across) == (2, [])
