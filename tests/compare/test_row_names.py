"""Rows of one variant: what their names and the notes say, and which of them is the baseline."""

from pathlib import Path
from typing import Any

import pytest
from reporting import compared
from runfolders import write_run

from gptattn.compare.comparison import Section
from gptattn.compare.finished_runs import read_runs
from gptattn.compare.groups import group_runs, pick_baseline

ROPE = {"_target_": "gptattn.position.RotaryPosition", "base": 10000.0, "original_context": None}
LEARNED = {"_target_": "gptattn.position.LearnedPosition"}
POSITIONS: dict[str, dict[str, Any]] = {"rope": ROPE, "learned": LEARNED, "none": {}}


def write(folder: Path, variant: str, position: str = "learned", **more: Any) -> None:
    """Write a run; `window` is of attn, all else of position."""
    window = more.pop("window", None)
    write_run(
        folder / f"{variant} {position} {window} {more}",
        variant,
        1,
        2.0,
        config={
            "choices": {"attn": variant, "position": position},
            "attn": {"_target_": f"gptattn.{variant}", "window": window},
            "position": POSITIONS[position] | more,
        },
    )


def names(folder: Path) -> set[str]:
    return {*group_runs(read_runs([folder])[0])}


def section(folder: Path) -> Section:
    (found,) = compared(folder).sections
    return found


def test_a_positions_setting_is_shown_only_if_another_run_has_that_position(tmp_path: Path) -> None:
    write(tmp_path, "mha")
    write(tmp_path, "mha", "none")
    write(tmp_path, "mha", "rope")
    write(tmp_path, "mha", "rope", base=500.0)
    assert names(tmp_path) == {
        "mha position=learned",
        "mha position=none",
        "mha position=rope position.base=10000.0",
        "mha position=rope position.base=500.0",
    }


def test_a_setting_that_is_null_is_not_shown(tmp_path: Path) -> None:
    write(tmp_path, "mha")
    write(tmp_path, "mha", window=4)
    assert names(tmp_path) == {"mha", "mha attn.window=4"}


def test_a_null_is_shown_beside_a_run_that_lacks_the_setting(tmp_path: Path) -> None:
    write(tmp_path, "mha")
    old = {"choices": {"attn": "mha", "position": "learned"}, "position": LEARNED}
    write_run(tmp_path / "old", "mha", 1, 2.0, config={"attn": {"_target_": "gptattn.mha"}, **old})
    assert names(tmp_path) == {"mha", "mha attn.window=None"}


def test_differing_positions_share_one_note(tmp_path: Path) -> None:
    write(tmp_path, "mha")
    write(tmp_path, "gqa", "rope")
    write(tmp_path, "mqa", "rope", base=500.0)
    (note,) = section(tmp_path).warnings
    said, _, values = note.removesuffix(")").partition(" (")
    assert said == "the variants differ in more than attention: position"
    assert {*values.split("; ")} == {
        "learned: 1 run",
        "rope base=10000.0: 1 run",
        "rope base=500.0: 1 run",
    }


@pytest.mark.parametrize("others", [[], ["gqa", "mqa"]])
def test_the_baseline_is_the_most_typical_row_of_mha(others: list[str], tmp_path: Path) -> None:
    write(tmp_path, "mha")
    # In name order, "mha attn..." would come first.
    write(tmp_path, "mha", "none", window=4)
    write(tmp_path, "mha", "none")
    for variant in others:
        write(tmp_path, variant)
    groups = group_runs(read_runs([tmp_path])[0])
    expected = "mha position=learned" if others else "mha position=none"
    assert pick_baseline(groups, None) == expected


def ablation(folder: Path, variant: str) -> None:
    """Write a recipe, and runs that have changed something in it."""
    muon = {"_target_": "gptattn.optim.Muon", "steps": 3}
    whole: dict[str, Any] = {
        "model": {"mlp": "swiglu"},
        "optim": {"decay": "linear", "matrices": muon, "lr": 0.1},
    }
    block = {"norm": "rms", "zero_init": True}
    whole |= {"attn": {"window": 4}, "block": block}
    changes: list[dict[str, Any]] = [
        {},
        {"model": {"mlp": "relu2"}},
        {"block": block | {"norm": "layer"}},
        {"block": block | {"zero_init": False}},
        {"optim": whole["optim"] | {"decay": "cosine"}},
        {"optim": whole["optim"] | {"matrices": None}},
        {"attn": {"window": None}},
    ]
    for i, change in enumerate(changes):
        write_run(folder / str(i), variant, 1, 2.0, config=whole | change)


@pytest.mark.parametrize("variant", ["mha", "mqa+gate"])
def test_rows_of_an_ablation_are_named_by_what_they_change(variant: str, tmp_path: Path) -> None:
    ablation(tmp_path, variant)
    assert names(tmp_path) == {
        variant,
        f"{variant} model.mlp=relu2",
        f"{variant} block.norm=layer",
        f"{variant} block.zero_init=False",
        f"{variant} optim.decay=cosine",
        f"{variant} optim.matrices=None",
        f"{variant} attn.window=None",
    }
    assert section(tmp_path).baseline == variant
    assert section(tmp_path).warnings == []


def test_a_confound_is_noted_even_if_it_names_some_rows(tmp_path: Path) -> None:
    for i, (variant, warmup) in enumerate([("gqa", 3), ("mha", 1), ("mha", 2), ("mqa", 3)]):
        write_run(tmp_path / str(i), variant, 1, 2.0, config={"optim": {"warmup": warmup}})
    assert {"mha optim.warmup=1", "mha optim.warmup=2"} < names(tmp_path)
    assert len([line for line in section(tmp_path).warnings if "optim.warmup" in line]) == 1


def test_rows_without_a_common_origin_are_named_by_all_that_differs(tmp_path: Path) -> None:
    for i in range(16):
        own = {"scale": i % 2, "window": i // 2 % 2, "a": i // 4 % 2, "b": i // 8}
        write_run(tmp_path / str(i), "mha", 1, 2.0, config={"attn": own})
    assert len(names(tmp_path)) == 16
    assert "mha attn.a=0 attn.b=1 attn.scale=0 attn.window=1" in names(tmp_path)
