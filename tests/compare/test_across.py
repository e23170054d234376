"""What changes between two sections that differ in the optimizer, the block or the precision."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from reporting import compared
from runfolders import write_run

from gptattn.compare.comparison import Across
from gptattn.compare.report import json_text
from gptattn.compare.table import tables_across
from gptattn.compare.verdicts import across_notes, across_words

MUON = {"_target_": "gptattn.optim.Muon", "steps": 5, "rms": 0.2}
OPTIM: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 0.001, "matrices": None},
    "muon": {"lr": 0.004, "matrices": MUON},
}
LOSSES = {
    "adamw": {"mha": [2.00, 2.01, 2.03], "gqa": [2.05, 2.07, 2.08], "mqa": [2.10, 2.12, 2.11]},
    "muon": {"mha": [1.90, 1.92, 1.93], "gqa": [1.90, 1.93, 1.93], "mqa": [1.95, 2.06, 1.99]},
}


def write(folder: Path, losses: Mapping[str, Sequence[float]], optim: str, **config: Any) -> None:
    """Write a run for each variant and loss; seeds count from 1."""
    choices = {"optim": optim, **config.pop("choices", {})}
    name = "_".join([optim, *choices.values()])
    for variant, values in losses.items():
        for seed, loss in enumerate(values, start=1):
            picked = {"choices": {"attn": variant, **choices}, "optim": OPTIM[optim], **config}
            write_run(folder / f"{variant}_{name}_{seed}", variant, seed, loss, config=picked)


def write_both(folder: Path) -> Path:
    for optim, losses in LOSSES.items():
        write(folder, losses, optim)
    return folder


def only(folder: Path) -> Across:
    (found,) = compared(folder).across
    return found


def test_an_interaction_is_the_change_of_a_difference_worked_by_hand(tmp_path: Path) -> None:
    found = only(write_both(tmp_path))
    gqa = found.gaps["gqa"]
    # To mha: 0.05, 0.06, 0.05 with AdamW; 0, 0.01, 0 with Muon: it changes by -0.05 at each seed.
    assert (gqa.first, gqa.second) == (pytest.approx(0.16 / 3), pytest.approx(0.01 / 3))
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


def test_changes_are_a_family_of_their_own(tmp_path: Path) -> None:
    found = only(write_both(tmp_path))
    assert list(found.losses) == ["mha", "gqa", "mqa"]
    assert list(found.gaps) == ["gqa", "mqa"]
    mha = found.losses["mha"]
    # -0.10, -0.09, -0.10: mean -0.29 / 3, squares about it 0.0006 / 9. Three comparisons:
    # t(1 - 0.05 / 6, 2) = 7.6488 from the table.
    half = 7.6488 * (0.0001 / 3) ** 0.5 / 3**0.5
    assert (mha.first, mha.second) == (pytest.approx(6.04 / 3), pytest.approx(5.75 / 3))
    assert mha.difference.interval == pytest.approx((-0.29 / 3 - half, -0.29 / 3 + half), abs=1e-6)
    assert mha.difference.comparisons == 3


def test_the_words_name_what_is_shown_and_what_is_not(tmp_path: Path) -> None:
    both = {name: {v: own[v] for v in ("mha", "gqa")} for name, own in LOSSES.items()}
    both["adamw"]["gqa"] = [2.05, 2.07, 2.09]  # to mha 0.05, 0.06, 0.06
    # Changes -0.05, -0.05, -0.06: mean -0.16 / 3, deviation 0.01 / root 3. One comparison:
    # t(0.975, 2) = 4.3027, so -0.0533 ± 0.0143; t = 16, p = 0.0039.
    for optim, losses in both.items():
        write(tmp_path, losses, optim)
    first, losses = across_words(only(tmp_path))
    assert first == (
        "against mha, gqa does better with optim=muon than with optim=adamw, by 0.0533 nats "
        "(95% interval 0.0390 to 0.0677; n = 3, p = 0.004): its difference to mha is +0.0567 with "
        "optim=adamw, +0.0033 with optim=muon."
    )
    assert losses == "with optim=muon instead of optim=adamw, the loss is lower for mha and gqa."
    assert across_notes(only(tmp_path)) == ["the two differ in more than optim: optim.lr"]


def test_changes_that_cannot_be_shown_share_one_line_with_the_number_of_seeds(
    tmp_path: Path,
) -> None:
    write_both(tmp_path)
    write(tmp_path / "more", {"tpa": [2.0, 2.2]}, "adamw")
    write(tmp_path / "more", {"tpa": [2.1, 1.9, 1.8]}, "muon")
    first, losses = across_words(only(tmp_path))
    assert first == (
        "no change of the difference to mha from optim=adamw to optim=muon can be shown for gqa, "
        "tpa and mqa, with 2 to 3 seeds."
    )
    assert losses.endswith(
        "is lower for mha and gqa; it cannot be shown to differ for tpa and mqa."
    )


def test_only_sections_that_differ_in_one_setting_are_compared(
    tmp_path: Path,
) -> None:
    for block in ("gpt2", "llama"):
        for optim, losses in LOSSES.items():
            shape = {"choices": {"block": block}, "block": {"norm": block}}
            write(tmp_path, losses, optim, **shape)
    found = {(one.where, one.first, one.second) for one in compared(tmp_path).across}
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
def test_without_a_common_baseline_and_another_row_there_is_no_table(
    muon: dict[str, list[float]], tmp_path: Path
) -> None:
    write(tmp_path, LOSSES["adamw"], "adamw")
    write(tmp_path, muon, "muon")
    found = compared(tmp_path)
    assert (len(found.sections), found.across) == (2, [])


def test_a_single_seed_gives_a_table_without_intervals(tmp_path: Path) -> None:
    for optim, losses in LOSSES.items():
        write(tmp_path, {variant: values[:1] for variant, values in losses.items()}, optim)
    found = only(tmp_path)
    dash = "\N{EN DASH}"
    (table,) = tables_across(compared(tmp_path))
    assert table.cells[2] == [
        *("gqa", "1", "2.0500", "1.9000", "-0.1500", dash, dash, "-0.0500", dash, dash)
    ]
    assert "Bonferroni" not in table.caption
    assert across_words(found)[0].endswith("for gqa and mqa, with 1 seed.")


def test_the_json_has_the_changes_and_their_words(tmp_path: Path) -> None:
    found = compared(write_both(tmp_path))
    (node,) = json.loads(json_text(found))["across"]
    assert node["words"] == across_words(found.across[0])
    assert node["gaps"]["mqa"]["difference"]["mean"] == pytest.approx(-0.04 / 3)
    assert node["others"] == ["optim.lr"]
