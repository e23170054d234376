"""What changes between two sections that differ in the optimizer, the block or the tokenizer."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from runfolders import write_run, write_sweep

from gptattn.compare.comparison import Across
from gptattn.compare.report import json_text
from gptattn.compare.table import load_comparison, tables_across
from gptattn.compare.verdicts import across_notes, across_words

Losses = Mapping[str, Sequence[float]]
MUON = {"_target_": "gptattn.optim.Muon", "steps": 5, "rms": 0.2}
OPTIM: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 0.001, "matrices": None},
    "muon": {"lr": 0.004, "matrices": MUON},
}
LOSSES = {
    "adamw": {"mha": [2.00, 2.01, 2.03], "gqa": [2.05, 2.07, 2.08], "mqa": [2.10, 2.12, 2.11]},
    "muon": {"mha": [1.90, 1.92, 1.93], "gqa": [1.90, 1.93, 1.93], "mqa": [1.95, 2.06, 1.99]},
}


def write(folder: Path, by_optim: Mapping[str, Losses], block: str = "gpt2") -> Path:
    """Write a run for each variant and loss; seeds count from 1."""
    for optim, losses in by_optim.items():
        config = {"optim": OPTIM[optim], "block": {"norm": block}}
        choices = {"optim": optim, "block": block}
        write_sweep(folder / f"{optim} {block}", losses, config=config, choices=choices)
    return folder


def only(folder: Path) -> Across:
    (found,) = load_comparison(folder).across
    return found


def test_an_interaction_is_the_change_of_a_difference_worked_by_hand(tmp_path):
    found = only(write(tmp_path, LOSSES))
    assert list(found.gaps) == ["gqa", "mqa"]
    gqa = found.gaps["gqa"]
    # To mha: 0.05, 0.06, 0.05 with AdamW; 0, 0.01, 0 with Muon: it changes by -0.05 at each seed.
    assert (gqa.before, gqa.after) == (pytest.approx(0.16 / 3), pytest.approx(0.01 / 3))
    assert gqa.difference.mean == pytest.approx(-0.05)
    assert gqa.difference.interval is None  # without spread there is nothing to judge chance by
    assert not gqa.difference.shown
    mqa = found.gaps["mqa"].difference
    # 0.10, 0.11, 0.08 and 0.05, 0.14, 0.06: changes -0.05, 0.03, -0.02, of mean -0.04 / 3. About
    # it -0.11 / 3, 0.13 / 3, -0.02 / 3: squares 0.0294 / 9, so a variance of 0.0049 / 3.
    assert mqa.mean == pytest.approx(-0.04 / 3)
    assert mqa.deviation == pytest.approx((0.0049 / 3) ** 0.5)
    # Two comparisons: t(1 - 0.0125, 2) = 6.2053 from the table.
    half = 6.2053 * 0.07 / 3
    assert mqa.interval == pytest.approx((-0.04 / 3 - half, -0.04 / 3 + half), abs=1e-5)
    assert (mqa.n, mqa.comparisons) == (3, 2)
    # The losses are a family of their own, of three comparisons.
    assert list(found.losses) == ["mha", "gqa", "mqa"]
    mha = found.losses["mha"]
    # -0.10, -0.09, -0.10: mean -0.29 / 3, squares about it 0.0006 / 9; t(1 - 0.05 / 6, 2) = 7.6488.
    half = 7.6488 * (0.0001 / 3) ** 0.5 / 3**0.5
    assert (mha.before, mha.after) == (pytest.approx(6.04 / 3), pytest.approx(5.75 / 3))
    assert mha.difference.interval == pytest.approx((-0.29 / 3 - half, -0.29 / 3 + half), abs=1e-6)
    assert mha.difference.comparisons == 3
    (node,) = json.loads(json_text(load_comparison(tmp_path)))["across"]
    assert node["words"] == across_words(found)
    assert node["gaps"]["mqa"]["difference"]["mean"] == pytest.approx(-0.04 / 3)


def test_the_words_name_what_is_shown_and_what_is_not(tmp_path):
    both = {name: {v: own[v] for v in ("mha", "gqa")} for name, own in LOSSES.items()}
    both["adamw"]["gqa"] = [2.05, 2.07, 2.09]  # to mha 0.05, 0.06, 0.06
    # Changes -0.05, -0.05, -0.06: mean -0.16 / 3, deviation 0.01 / root 3. One comparison:
    # t(0.975, 2) = 4.3027, so -0.0533 ± 0.0143; t = 16, p = 0.0039.
    found = only(write(tmp_path, both))
    first, losses = across_words(found)
    assert first == (
        "against mha, gqa does better with optim=muon than with optim=adamw, by 0.0533 nats "
        "(95% interval 0.0390 to 0.0677; n = 3, p = 0.004): its difference to mha is +0.0567 with "
        "optim=adamw, +0.0033 with optim=muon."
    )
    assert losses == "with optim=muon instead of optim=adamw, the loss is lower for mha and gqa."
    assert across_notes(found) == ["the two differ in more than optim: optim.lr"]


def test_changes_that_cannot_be_shown_share_one_line_with_the_number_of_seeds(tmp_path):
    more = {"adamw": {"tpa": [2.0, 2.2]}, "muon": {"tpa": [2.1, 1.9, 1.8]}}
    first, losses = across_words(
        only(write(tmp_path, {optim: own | more[optim] for optim, own in LOSSES.items()}))
    )
    assert first == (
        "for gqa, tpa and mqa, the runs do not show that the difference from mha changes between "
        "optim=adamw and optim=muon, with 2 to 3 seeds."
    )
    assert losses.endswith(
        "is lower for mha and gqa; it cannot be shown to differ for tpa and mqa."
    )


def test_only_sections_that_differ_in_one_setting_are_compared(tmp_path):
    for block in ("gpt2", "llama"):
        write(tmp_path, LOSSES, block)
    found = {(one.where, one.first, one.second) for one in load_comparison(tmp_path).across}
    assert found == {
        ("block=gpt2", "optim=adamw", "optim=muon"),
        ("block=llama", "optim=adamw", "optim=muon"),
        ("optim=adamw", "block=gpt2", "block=llama"),
        ("optim=muon", "block=gpt2", "block=llama"),
    }


@pytest.mark.parametrize(
    "muon",
    [
        {"gqa": [1.9, 1.8], "mqa": [1.9, 1.8]},  # without mha: another baseline
        {"mha": [1.9, 1.8], "tpa": [1.9, 1.8]},  # nothing to compare but the baseline
    ],
)
def test_without_a_common_baseline_and_another_row_there_is_no_table(muon, tmp_path):
    found = load_comparison(write(tmp_path, {**LOSSES, "muon": muon}))
    assert (len(found.sections), found.across) == (2, [])


TARGETS = {"byte": "x.ByteTokenizer", "bpe": "x.TrainedBPE"}
TOKENS = {"byte": 700, "bpe": 200}
BITS = {"byte": [2.00, 2.03, 2.01], "bpe": [1.80, 1.84, 1.80]}


def write_tokenizers(folder: Path, **of_bpe: Any) -> Path:
    """Write mha at each tokenizer's bits per byte, of 700 held-out bytes; seeds count from 1."""
    for name, tokens in TOKENS.items():
        own = {"tokenizer": name, "val_tokens": tokens, "val_bytes": 700}
        for seed, bits in enumerate(BITS[name], start=1):
            write_run(
                folder / f"{name}_{seed}",
                "mha",
                seed,
                bits * math.log(2) * 700 / tokens,
                data=own | (of_bpe if name == "bpe" else {}),
                config={"tokenizer": {"_target_": TARGETS[name]}},
                choices={"tokenizer": name},
                metrics={"val/bits_per_byte": bits, "cost/params": 10_000 / tokens},
            )
    return folder


def test_two_tokenizers_are_compared_in_bits_per_byte(tmp_path):
    found = only(write_tokenizers(tmp_path))
    assert (found.first, found.second) == ("tokenizer=byte", "tokenizer=bpe")
    mha = found.losses["mha"]
    assert (mha.before, mha.after) == (pytest.approx(6.04 / 3), pytest.approx(5.44 / 3))
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
    (table,) = tables_across(load_comparison(tmp_path))
    assert table.caption.startswith("mean bits per byte over the n seeds in common; ")
    assert [row[:5] for row in table.cells] == [
        ["variant", "n", "tokenizer=byte", "tokenizer=bpe", "change"],
        ["mha", "3", "2.0133", "1.8133", "-0.2000"],
    ]


@pytest.mark.parametrize("other", [{"val_bytes": 699}, {"text_sha256": "zzz"}])
def test_runs_with_other_held_out_bytes_are_never_compared(other, tmp_path):
    write_tokenizers(tmp_path, **other)
    found = load_comparison(tmp_path)
    assert (len(found.sections), found.across) == (2, [])
