"""What the report makes of a sweep that went on by `sweep.until`, and of its record."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from reporting import compared
from runfolders import write_run

from gptattn.compare.statistics import Difference
from gptattn.compare.verdicts import section_words, sure_words
from gptattn.runs.folder import RunFolder
from gptattn.runs.two_stages import (
    NAME,
    TwoStages,
    read_two_stages,
    variant_key,
    write_two_stages,
)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"first": [1], "half_widths": {"a": 0}}',
        '{"first": 3}',
        "[]",
        '{"first": [1], "half_widths": {"a": "x"}}',
    ],
)
def test_a_damaged_record_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(text)
    assert read_two_stages(tmp_path) is None


def difference(
    folder: Path, losses: Mapping[str, Sequence[float]], half_width: float
) -> tuple[Difference, list[str], list[str]]:
    folder.mkdir()
    half_widths: dict[str, float] = {}
    for variant, values in losses.items():
        for seed, loss in enumerate(values, start=1):
            write_run(folder / f"{variant}_{seed}", variant, seed, loss)
            settings = RunFolder(folder / f"{variant}_{seed}").read_settings()
            half_widths[variant_key(settings)] = half_width
    write_two_stages(folder, TwoStages((1, 2, 3), half_widths))
    (section,) = compared(folder).sections
    (found,) = [row.difference for row in section.rows if row.difference]
    return found, section_words(section), sure_words(section)


def test_only_the_first_stage_sets_the_deviation(tmp_path: Path) -> None:
    # Differences 0.01, 0.02, 0.03 of deviation 0.01, then wild ones; the mean of nine is 0.04.
    more = [0.01, 0.02, 0.03, 1.0, -0.64, 0.05, -0.04, -0.08, 0.01]
    losses = {"mha": [2.0] * 9, "gqa": [2.0 + d for d in more]}
    found, words, sure = difference(tmp_path / "wide", losses, half_width=0.02)
    half = 4.302653 * 0.01 / 3  # t of 2 degrees, 9 seeds
    assert (found.n, found.first) == (9, 3)
    assert found.interval == pytest.approx((0.04 - half, 0.04 + half), abs=1e-6)
    assert "gqa is worse than mha by 0.0400 nats" in words[0]
    assert sure[0].startswith("The spread over the first 3 seeds ")


@pytest.mark.parametrize(
    ("half_width", "said"),
    [
        # +-0.0143 around 0.001.
        (0.015, "if there is one, it is at most 0.0153 nats"),
        # (4.302653 * 0.01 / 0.005) squared is 74.05.
        (0.005, "±0.005 nats would need about 75 seeds"),
    ],
)
def test_differences_not_shown_are_bounded_or_need_more_seeds(
    half_width: float, said: str, tmp_path: Path
) -> None:
    more = [0.0, 0.01, -0.01, 0.009, 0.0, 0.0, 0.0, 0.0, 0.0]
    losses = {"mha": [2.0] * 9, "gqa": [2.0 + d for d in more]}
    _, words, _ = difference(tmp_path / "narrow", losses, half_width)
    assert f": {said}" in words[0]


def test_without_a_second_stage_nothing_changes(tmp_path: Path) -> None:
    losses = {"mha": [2.0, 2.01, 2.0], "gqa": [2.1, 2.13, 2.1]}
    found, _, sure = difference(tmp_path / "first", losses, half_width=0.5)
    assert found.first is None
    assert not sure
