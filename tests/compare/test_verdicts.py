"""The report's sentences claim no more than the runs support."""

from pathlib import Path
from typing import Any

import pytest
from reporting import compared
from runfolders import write_run

from gptattn.compare.comparison import Section
from gptattn.compare.table import markdown_table, report_rows
from gptattn.compare.verdicts import (
    match_words,
    more_or_fewer,
    nats,
    p_value,
    section_words,
    share,
    sure_words,
)

BASE = [2.00, 2.01, 2.02, 2.03, 2.04]


def section(tmp_path: Path, losses: dict[str, list[float]], **extra: dict[str, Any]) -> Section:
    """Return the section on these losses; `extra` holds further metrics by variant."""
    for variant, values in losses.items():
        for seed, loss in enumerate(values):
            metrics = dict(extra.get(variant, {}))
            speeds = metrics.pop("speeds", None)
            if speeds is not None:
                metrics["perf/tokens_per_s"] = speeds[seed]
            write_run(tmp_path / f"{variant}_{seed}", variant, seed, loss, metrics=metrics)
    (found,) = compared(tmp_path).sections
    return found


def test_runs_that_shared_the_machine_have_gaps_for_their_speed_and_no_words_on_it(
    tmp_path: Path,
) -> None:
    shared = dict.fromkeys(("perf/tokens_per_s", "perf/step_ms"))
    found = section(tmp_path, {"mha": BASE, "gqa": BASE, "mqa": BASE[::-1]}, gqa=shared)
    heading, *rows = report_rows(found)
    cells = {row[0]: dict(zip(heading, row, strict=True)) for row in rows}
    assert cells["gqa"]["tokens/s"] == cells["gqa"]["step ms"] == "\N{EN DASH}"
    assert cells["mqa"]["tokens/s"] == "1,000"
    assert {row.name for row in found.rows if row.speed is None} == {"mha", "gqa"}
    assert all("token" not in line for line in section_words(found) if line.startswith("gqa"))


def test_a_difference_is_stated_with_its_interval_and_its_p(tmp_path: Path) -> None:
    worse = [loss + d for loss, d in zip(BASE, (0.110, 0.120, 0.130, 0.120, 0.120), strict=True)]
    found = section(tmp_path, {"mha": BASE, "gqa": worse})
    # Mean 0.12, deviation root of 0.0002 / 4; t(0.975, 4) = 2.776445 from the table, root of 5.
    half = 2.776445 * 0.00707107 / 5**0.5
    gqa = found.rows[1].difference
    assert gqa is not None
    assert gqa.interval == pytest.approx((0.12 - half, 0.12 + half))
    # 0.1112 to 0.1288; t = 37.9 with 4 degrees of freedom.
    assert section_words(found) == [
        "gqa is worse than mha by 0.1200 nats (95% interval 0.1112 to 0.1288; n = 5, p < 0.001).",
        "mha is the best of the 2 by validation loss: lower than every other (n = 5, p < 0.001 "
        "or less).",
    ]


def test_without_evidence_the_words_say_how_many_seeds_it_would_take(tmp_path: Path) -> None:
    # Differences 0.01, -0.01, 0.02, -0.005, 0.01: mean 0.005, deviation 0.01225 (by hand).
    mixed = [loss + d for loss, d in zip(BASE, (0.01, -0.01, 0.02, -0.005, 0.01), strict=True)]
    found = section(tmp_path, {"mha": BASE, "gqa": mixed})
    d = found.rows[1].difference
    assert d is not None
    assert d.deviation == pytest.approx(0.01225, abs=1e-5)
    # Effect 0.408: 50 seeds by G*Power's tables (7.849 / 0.408^2 + 1.92, rounded up).
    assert d.seeds_needed == 50
    # t = 0.913 with 4 degrees of freedom: p = 0.41; 0.005 -+ 2.7764 * 0.01225 / root of 5.
    assert section_words(found) == [
        "no difference between gqa and mha can be shown at n = 5 (95% interval -0.0102 to +0.0202, "
        "p = 0.41): if the true difference is as large as the one observed, 0.0050 nats, about 50 "
        "seeds would show it.",
        "mha has the lowest mean loss, but cannot be told apart from gqa.",
    ]


def test_differences_without_a_spread_over_seeds_are_not_taken_for_certain(tmp_path: Path) -> None:
    """The seed may have no effect, and then five runs are no more than one run."""
    losses = {"mha": BASE, "gqa": [loss - 0.1 for loss in BASE], "mha_wrapper": BASE}
    found = section(tmp_path, losses)
    assert section_words(found) == [
        "no difference between gqa and mha can be shown at n = 5: they differ by the same "
        "amount at every seed, -0.1000 nats, as if the seed had no effect or losses were rounded, "
        "so there is no spread to test against.",
        "no difference between mha_wrapper and mha can be shown at n = 5: their losses are equal "
        "at every seed.",
        "gqa has the lowest mean loss, but cannot be told apart from mha and mha_wrapper.",
    ]
    assert report_rows(found)[2][3:6] == ["-0.1000", "\N{EN DASH}", "\N{EN DASH}"]


@pytest.mark.parametrize("n", [1, 2])
def test_below_three_seeds_no_variant_is_named_best(n: int, tmp_path: Path) -> None:
    found = section(tmp_path, {"mha": [2.0, 2.1][:n], "gqa": [1.0, 1.1][:n], "mqa": BASE})
    words = section_words(found)
    assert words[-1] == f"Fewer than 3 seeds (mha: {n} and gqa: {n}): no variant is named best."
    assert "best" not in " ".join(words).replace("no variant is named best", "")
    assert not any("better" in line or "worse" in line for line in words)
    if n == 1:
        assert "a single pair (-1.0000 nats) has no spread over seeds" in words[0]


def test_only_seeds_of_both_are_compared(tmp_path: Path) -> None:
    for seed, loss in ((1, 2.0), (2, 2.5), (3, 9.0)):
        write_run(tmp_path / f"a{seed}", "mha", seed, loss)
    for seed, loss in ((2, 2.6), (1, 2.2), (4, 0.0)):
        write_run(tmp_path / f"b{seed}", "gqa", seed, loss)
    (found,) = compared(tmp_path).sections
    difference = found.rows[1].difference
    assert difference is not None
    # The differences are 0.2 at seed 1 and 0.1 at seed 2.
    assert (difference.n, difference.mean) == (2, pytest.approx(0.15))


def test_what_a_variant_costs_follows_in_simple_fractions(tmp_path: Path) -> None:
    cost = {
        "cost/kv_bytes_per_token": 1024 / 3,
        "cost/params": 1080,
        "cost/flops_per_token": 738048.0 * 0.962,
        "speeds": [1090.0, 1100.0, 1095.0, 1105.0, 1100.0],
    }
    found = section(tmp_path, {"mha": BASE, "gqa": BASE}, gqa=cost)
    assert section_words(found)[0].endswith(
        "; gqa needs 1/3 of the cache, has 10% fewer parameters, takes 3.8% fewer FLOPs per token "
        "and trained at 1.10 times the tokens/s (1.09 to 1.11)."
    )


def test_a_speed_that_may_be_chance_is_not_mentioned(tmp_path: Path) -> None:
    speeds = {"speeds": [900.0, 1100.0, 1200.0, 950.0, 1010.0]}
    found = section(tmp_path, {"mha": BASE, "gqa": BASE}, gqa=speeds)
    assert "tokens/s" not in section_words(found)[0]


def test_what_shared_seeds_were_worth_is_said_from_five_on(tmp_path: Path) -> None:
    # Losses of equal variance and a correlation of 5 / 10. Fisher's transform of its interval:
    # 0.5493 -+ 1.9600 / root 2, back at -0.684 and 0.959.
    found = section(tmp_path, {"mha": BASE, "gqa": [2.09, 2.08, 2.12, 2.11, 2.10]})
    assert sure_words(found) == [
        "Sharing seeds made the variance of the differences 0.50 of what runs at other seeds would "
        "have (95% interval 0.04 to 1.68; n = 5)."
    ]
    few = section(tmp_path / "few", {"mha": BASE[:4], "gqa": [2.09, 2.08, 2.12, 2.11]})
    assert sure_words(few) == []


def test_numbers_in_words() -> None:
    assert [nats(x) for x in (0.0123456, 0.0, 0.00002)] == ["0.0123", "0.0000", "2.0e-05"]
    assert [p_value(p) for p in (0.0004, 0.0079, 0.049, 0.0499, 0.05, 0.1, 1.0)] == [
        "p < 0.001",
        "p = 0.008",
        "p = 0.049",
        "p < 0.05",
        "p = 0.050",
        "p = 0.10",
        "p = 1.00",
    ]
    assert [share(x, 12.0) for x in (3.0, 8.0, 24.0, 18.0, 4.44, 15.55)] == [
        "1/4",
        "2/3",
        "2 times",
        "1.5 times",
        "37.0%",
        "1.30 times",
    ]
    assert more_or_fewer(90, 100) == "10% fewer"
    assert more_or_fewer(103.8, 100) == "3.8% more"
    assert more_or_fewer(100.04, 100) == "0.04% more"


def test_what_was_matched_is_said(tmp_path: Path) -> None:
    match = {"what": "params", "to": "mha", "field": "model.d_mlp", "before": 512, "after": 545}
    match |= {"target": 124672, "reached": 124727}
    write_run(tmp_path / "a", "mha", 1, 2.0, d_model=128)
    write_run(tmp_path / "b", "gqa", 1, 2.0, d_model=128, d_mlp=545, match=match)
    (found,) = compared(tmp_path).sections
    # 55 / 124,672 = 0.0441%, rounded up.
    assert match_words(found) == [
        "match=params: gqa's MLP widened from 512 to 545, parameters within 0.05% of mha's."
    ]
    assert found.warnings == []


def test_a_section_without_the_baseline_has_another_and_says_so(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "mha", 1, 2.0)
    write_run(tmp_path / "b", "gqa", 1, 2.1, config={"budget": {"steps": 2000}})
    short, long = compared(tmp_path, baseline="mha").sections
    assert (short.warnings, long.baseline) == ([], "gqa")
    assert long.warnings == ["mha is not among these runs; the baseline here is gqa"]


def test_markdown_cells_hold_no_markup_of_others() -> None:
    assert markdown_table([["h"], ["a|b<i>"]]).splitlines()[-1] == "| a\\|b&lt;i> |"


def test_the_reports_table_by_hand(tmp_path: Path) -> None:
    found = section(tmp_path, {"mha": [2.0, 2.5, 3.0], "gqa": [2.1, 2.7, 3.3]})
    heading, mha, gqa = report_rows(found)
    assert heading[:6] == ["variant", "n", "val loss", "vs mha", "95% interval", "p"]
    # t(0.975, 2) * 0.5 / sqrt(3) = 1.2421.
    assert mha[:3] == ["mha", "3", "2.5000 ± 1.2421"]
    # 0.2 -+ 4.3027 * 0.1 / sqrt(3); t = 3.464: p = 1 - sqrt(12 / 14).
    assert gqa[3:6] == ["+0.2000", "-0.0484 to +0.4484", "0.074"]
    assert gqa[heading.index("MFLOPs/token")] == "0.74"  # 738,048
