"""The report's sentences agree with its decisions and claim no more than the runs support."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reporting import only_section
from rich.console import Console
from runfolders import write_sweep
from scipy.stats import binom

from gptattn.compare import statistics
from gptattn.compare.comparison import Section, make_section
from gptattn.compare.finished_runs import Run
from gptattn.compare.table import Table, report_rows
from gptattn.compare.verdicts import best_words, nats, p_value, section_words, seed_notes
from gptattn.machine.disk import write_json
from gptattn.runs.folder import RunFolder
from gptattn.runs.two_stages import NAME, TwoStages, variant_key

BASE = [2.00, 2.01, 2.02, 2.03, 2.04]
COSTS = {
    "cost/kv_bytes_per_token": 1024.0,
    "cost/params": 1200,
    "cost/flops_per_token": 738_048.0,
}
FIELDS = 250
MOST = binom.ppf(0.999, FIELDS, 0.05)  # false claims that 5% allows, with 0.1% beyond


def section(
    losses: Mapping[str, Sequence[float] | Mapping[int, float]], **costs: Mapping[str, Any]
) -> Section:
    """Return the report's only section on these losses; a sequence has the seeds from 1 on.

    `costs` are metrics of a variant.
    """
    groups: dict[str, list[Run]] = {}
    for name, values in losses.items():
        by_seed = values if isinstance(values, Mapping) else dict(enumerate(values, start=1))
        for seed, loss in by_seed.items():
            metrics = {"val/loss": float(loss), **costs.get(name, {})}
            run = Run(Path(f"{name}_{seed}"), name, seed, metrics, {"attn": name})
            groups.setdefault(name, []).append(run)
    return make_section(groups, "mha")


def simulated(means: Sequence[float], n: int, seed: int, shape: str = "normal") -> list[Section]:
    """Return FIELDS reports on variants with these true losses; the first is mha, the baseline."""
    draw = getattr(np.random.default_rng(seed), shape)
    fields = draw(size=(FIELDS, len(means), n)) + np.array(means)[:, None]
    names = ["mha", *(f"v{i}" for i in range(1, len(means)))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "seeds_needed", lambda *_: None)  # slow, and no decision needs it
        return [section(dict(zip(names, losses, strict=True))) for losses in fields]


@pytest.mark.parametrize(
    ("variants", "n", "shape"), [(2, 5, "normal"), (4, 5, "normal"), (3, 8, "exponential")]
)
def test_reports_on_equal_variants_rarely_show_a_difference(variants, n, shape):
    found = simulated([0.0] * variants, n, variants, shape)
    rows = sum(any(r.difference and r.difference.is_significant for r in s.rows) for s in found)
    from_first = sum(len(s.ties) < variants - 1 for s in found)
    assert rows <= MOST
    assert from_first <= MOST
    # The sentence agrees with the decision.
    assert from_first == sum(
        "is the best" in best_words(s)
        or any(row.name not in best_words(s) for row in s.rows if row.name != s.leader)
        for s in found
    )


def test_equal_variants_far_from_the_baseline_are_not_told_apart():
    found = simulated([9.0, 0.0, 0.0, 0.0], 6, 1)
    assert sum(any(n in s.ties for n in ("v1", "v2", "v3")) for s in found) >= FIELDS - MOST
    assert not any("mha" in s.ties for s in found)
    assert sum("is the best" in best_words(s) for s in found) <= MOST


def test_sentences_agree_and_no_stated_interval_contains_0():
    """Uses differences of all sizes, with which two families of tests would often disagree."""
    stated = best = 0
    fields = [*simulated([2.5, 0.0, 1.5, 3.0], 6, 2), *simulated([0.0, 0.4, 3.0, 3.2], 6, 3)]
    for found in fields:
        last = best_words(found)
        best += "is the best" in last
        for row in found.rows:
            d = row.difference
            if d is None:
                continue
            assert d.is_significant == (d.interval[0] > 0 or d.interval[1] < 0)
            stated += d.is_significant
            if found.leader in (row.name, found.baseline):
                other = found.baseline if row.name == found.leader else row.name
                assert (other in found.ties) == (not d.is_significant)
        if "is the best" in last and found.leader == found.baseline:
            assert all("is worse than" in line for line in section_words(found)[:-1])
    assert stated > FIELDS
    assert best > FIELDS / 20


def test_the_leader_is_compared_with_a_correction_over_all_pairs():
    losses = {"mha": [3.0, 3.1, 3.2, 3.15], "a": [1.0, 1.1, 1.2, 1.1], "b": [1.3, 1.5, 1.4, 1.4]}
    losses["c"] = [1.6, 1.5, 1.7, 1.6]
    wider = losses | {"d": [2.6, 2.5, 2.7, 2.4]}
    found = [{d.variant: d.comparisons for d in section(own).rivals} for own in (losses, wider)]
    # a, b, c and d form 6 pairs. The pair with the baseline is one of its 4 comparisons.
    assert found == [{"mha": 3, "b": 3, "c": 3}, {"mha": 4, "b": 6, "c": 6, "d": 6}]


def test_two_variants_like_the_baseline_are_not_told_apart():
    # a - b is -0.1 to within 0.001 at each seed, but neither differs from the noisy mha.
    noisy = {"mha": [2.3, 1.8, 2.2, 1.75, 2.25], "a": [2.0, 2.1, 2.2, 1.9, 1.8]}
    found = section({**noisy, "b": [2.101, 2.2, 2.299, 2.0, 1.9]})
    assert (found.leader, {*found.ties}) == ("a", {"mha", "b"})
    assert next(d for d in found.rivals if d.variant == "b").is_significant


def test_a_lead_that_the_common_seeds_contradict_is_no_lead():
    gqa = {1: 2.10, 2: 2.112, 3: 2.119, 4: 1.0, 5: 1.0}
    words = section_words(section({"mha": [2.00, 2.01, 2.02], "gqa": gqa}))
    assert words[0].startswith("gqa is worse than mha by 0.1003 nats")
    assert "mha is better over the seeds in common" in words[1]


def test_only_shared_seeds_are_compared_and_single_pairs_are_not_corrected():
    losses = {"mha": [2.0, 2.5, 9.0], "a": {2: 2.6, 1: 2.2, 4: 0.0}, "b": {1: 2.0}, "c": {9: 1.9}}
    found = {row.name: row.difference for row in section(losses).rows}
    # The differences of a are 0.2 at seed 1 and 0.1 at seed 2.
    figures = {name: (d.n, d.mean, d.comparisons) for name, d in found.items() if d}
    assert figures == {"a": (2, pytest.approx(0.15), 1), "b": (1, 0.0, 1)}


# How far gqa's losses are above mha's at each seed; words of its verdict, and of the best row's.
VERDICTS = [
    # Mean 0.12, deviation root of 0.0002 / 4; t(0.975, 4) = 2.776445 from the table, root of 5:
    # 0.12 -+ 0.00878. t = 37.9 with 4 degrees of freedom.
    (
        (0.110, 0.120, 0.130, 0.120, 0.120),
        ("gqa is worse than mha by 0.1200 nats", "0.1112 to 0.1288; n = 5, p < 0.001"),
        ("mha is the best", "n = 5", "p < 0.001"),
    ),
    # Mean 0.005, deviation 0.01225. Effect 0.408: 50 seeds by G*Power's tables (7.849 / 0.408^2 +
    # 1.92, rounded up). t = 0.913 with 4 degrees of freedom: p = 0.41; 0.005 -+ 2.7764 * 0.01225 /
    # root of 5.
    (
        (0.01, -0.01, 0.02, -0.005, 0.01),
        ("too close", "-0.0102 and +0.0202", "p = 0.41", "0.0050 nats", "about 50 seeds"),
        ("too close", "mha has the lowest mean loss", "over gqa"),
    ),
    # The seed may have no effect, and then five runs are no more than one run.
    ((-0.1,) * 5, ("cannot be tested", "-0.1000 nats"), ("gqa has", "over mha")),
    ((0.0,) * 5, ("cannot be tested", "+0.0000 nats"), ("mha has", "over gqa")),
]


@pytest.mark.parametrize(("more", "difference", "best"), VERDICTS)
def test_words_state_a_difference_or_say_what_would_show_it(more, difference, best):
    found = section({"mha": BASE, "gqa": np.array(BASE) + more})
    lines = section_words(found)
    assert len(lines) == 2
    for line, words in zip(lines, (difference, best), strict=True):
        assert all(word in line for word in words)
    if "-0.1000 nats" in difference:
        assert report_rows(found)[2][3:6] == ["-0.1000", "\N{EN DASH}", "\N{EN DASH}"]


def test_differences_that_only_rounding_spreads_count_as_equal():
    losses = np.array([0.3, 1.7, 2.3])
    assert np.ptp((losses + 0.1) - losses) > 0  # float64 rounding leaves a spread
    for more, tested in ((0.1, False), (np.array([0.1, 0.1, 0.10001]), True)):
        row = section({"mha": losses, "gqa": losses + more}).rows[1]
        assert (row.difference.p is not None) == tested


@pytest.mark.parametrize("n", [1, 2])
def test_below_three_seeds_no_variant_is_named_best(n):
    words = section_words(section({"mha": [2.0, 2.1][:n], "gqa": [1.0, 1.1][:n], "mqa": BASE}))
    assert f"(mha: {n} and gqa: {n})" in words[-1]
    assert not any("better" in line or "worse" in line or "the best" in line for line in words)
    assert ("too few seeds" in words[0]) == (n == 1)


def test_what_a_variant_costs_follows_as_ratios():
    times = {"kv_bytes_per_token": 1 / 3, "params": 0.9, "flops_per_token": 0.962}
    cost = {f"cost/{name}": COSTS[f"cost/{name}"] * by for name, by in times.items()}
    found = section({"mha": BASE, "gqa": BASE}, mha=COSTS, gqa=cost)
    for words in ("0.333 times the cache", "0.9 times the parameters", "0.962 times the FLOPs"):
        assert words in section_words(found)[0]


def test_numbers_in_words():
    assert [nats(x) for x in (0.0123456, 0.0, 0.00002)] == ["0.0123", "0.0000", "2.0e-05"]
    p_values = {
        0.0004: "p < 0.001",
        0.0079: "p = 0.008",
        0.049: "p = 0.049",
        0.0499: "p < 0.05",
        0.05: "p = 0.050",
        0.1: "p = 0.10",
        1.0: "p = 1.00",
    }
    assert {p: p_value(p) for p in p_values} == p_values


def test_the_reports_table_by_hand():
    losses = {"mha": [2.0, 2.5, 3.0], "gqa": [2.1, 2.7, 3.3]}
    heading, mha, gqa = report_rows(section(losses, mha=COSTS, gqa=COSTS))
    assert heading[:6] == ["variant", "n", "val loss", "vs mha", "95% interval", "p"]
    # t(0.975, 2) * 0.5 / sqrt(3) = 1.2421.
    assert mha[:3] == ["mha", "3", "2.5000 ± 1.2421"]
    # 0.2 -+ 4.3027 * 0.1 / sqrt(3); t = 3.464: p = 1 - sqrt(12 / 14).
    assert gqa[3:6] == ["+0.2000", "-0.0484 to +0.4484", "0.074"]
    assert gqa[heading.index("MFLOPs/token")] == "0.74"  # 738,048
    assert Table("", [["h"], ["a|b<i>"]]).to_markdown().splitlines()[-1] == "| a\\|b&lt;i> |"


def two_stages(folder: Path, differences: Sequence[float], half_width: float) -> Section:
    """Return the section of a sweep whose first three seeds were its first stage."""
    base = [2.0, 2.01, 2.0, *[2.0] * (len(differences) - 3)]
    gqa = [loss + d for loss, d in zip(base, differences, strict=True)]
    write_sweep(folder, {"mha": base, "gqa": gqa})
    keys = {variant_key(RunFolder(path).read_record()) for path in folder.iterdir()}
    write_json(folder / NAME, TwoStages((1, 2, 3), dict.fromkeys(keys, half_width)))
    return only_section(folder)


def test_only_the_first_stage_sets_the_deviation(tmp_path):
    # Differences 0.01, 0.02, 0.03 of deviation 0.01, then wild ones; the mean of nine is 0.04.
    found = two_stages(tmp_path, [0.01, 0.02, 0.03, 1.0, -0.64, 0.05, -0.04, -0.08, 0.01], 0.02)
    difference = found.rows[1].difference
    half = 4.302653 * 0.01 / 3  # t of 2 degrees, 9 seeds
    assert (difference.n, difference.first) == (9, 3)
    assert difference.interval == pytest.approx((0.04 - half, 0.04 + half), abs=1e-6)
    assert "gqa is worse than mha by 0.0400 nats" in section_words(found)[0]
    assert "first 3 seeds" in seed_notes(found)[0]


# +-0.0143 around 0.001; (4.302653 * 0.01 / 0.005) squared is 74.05.
@pytest.mark.parametrize(
    ("half_width", "verdict"), [(0.015, "at most 0.0153 nats"), (0.005, "about 75 seeds")]
)
def test_differences_not_shown_are_bounded_or_need_more_seeds(half_width, verdict, tmp_path):
    found = two_stages(tmp_path, [0.0, 0.01, -0.01, 0.009, 0.0, 0.0, 0.0, 0.0, 0.0], half_width)
    assert verdict in section_words(found)[0]


@pytest.mark.parametrize(("most", "verdict"), [(50, "'seed=range(1,51)'"), (49, "even 49 seeds")])
def test_more_seeds_are_asked_for_up_to_the_most(most, verdict):
    more = (0.01, -0.01, 0.02, -0.005, 0.01)  # needs 50 (`VERDICTS`)
    groups = {
        name: [
            Run(Path(f"{name}{seed}"), name, seed, {"val/loss": loss}, {}, max_seeds=most)
            for seed, loss in enumerate(losses, start=1)
        ]
        for name, losses in {"mha": BASE, "gqa": np.array(BASE) + more}.items()
    }
    assert verdict in section_words(make_section(groups, "mha"))[0]


def test_columns_that_do_not_fit_are_named(capsys):
    table = Table("", [["variant", "val loss", "peak MB"], ["m" * 20, "2.0000", "400"]])
    for width, named in ((80, False), (36, True)):
        table.print(Console(width=width))
        assert ("peak MB" in capsys.readouterr().out.splitlines()[-2]) == named
