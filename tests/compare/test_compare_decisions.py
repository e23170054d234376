"""The report's decisions do not contradict each other, and false claims stay at 5%."""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from runfolders import loaded_runs
from scipy.stats import binom

from gptattn.compare import statistics
from gptattn.compare.comparison import Section, make_section
from gptattn.compare.finished_runs import Run
from gptattn.compare.verdicts import first_words, section_words

FIELDS = 400
MOST = binom.ppf(0.999, FIELDS, 0.05)  # false claims that 5% allows, with 0.1% beyond


def section(losses: Mapping[str, Sequence[float] | Mapping[int, float]]) -> Section:
    """Return the report's only section on these losses; a sequence has the seeds from 1 on."""
    by_seed = {
        name: values if isinstance(values, Mapping) else dict(enumerate(values, start=1))
        for name, values in losses.items()
    }
    groups: dict[str, list[Run]] = {}
    for run in loaded_runs(by_seed):
        groups.setdefault(run.variant, []).append(run)
    return make_section(groups, "mha")


def simulated(means: Sequence[float], n: int, seed: int, shape: str = "normal") -> list[Section]:
    """Return FIELDS reports on variants with these true losses; the first is mha, the baseline."""
    generator = np.random.default_rng(seed)
    size = (FIELDS, len(means), n)
    noise = generator.normal(size=size) if shape == "normal" else generator.exponential(size=size)
    names = ["mha", *(f"v{i}" for i in range(1, len(means)))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "seeds_needed", lambda *_: None)  # slow, and no decision needs it
        return [
            section(dict(zip(names, losses, strict=True)))
            for losses in noise + np.array(means)[:, None]
        ]


@pytest.mark.parametrize(
    ("variants", "n", "shape"), [(2, 5, "normal"), (3, 12, "normal"), (4, 5, "normal"), (3, 8, "x")]
)
def test_reports_on_equal_variants_rarely_show_a_difference(
    variants: int, n: int, shape: str
) -> None:
    found = simulated([0.0] * variants, n, variants, shape)
    rows = sum(any(row.difference and row.difference.shown for row in s.rows) for s in found)
    from_first = sum(len(s.alike) < variants - 1 for s in found)
    assert rows <= MOST
    assert from_first <= MOST
    # The sentence agrees with the decision.
    assert from_first == sum(
        "is the best" in first_words(s)
        or any(row.name not in first_words(s) for row in s.rows if row.name != s.leader)
        for s in found
    )


def test_equal_variants_far_from_the_baseline_are_not_told_apart() -> None:
    found = simulated([9.0, 0.0, 0.0, 0.0], 6, 1)
    assert sum(any(n in s.alike for n in ("v1", "v2", "v3")) for s in found) >= FIELDS - MOST
    assert not any("mha" in s.alike for s in found)
    assert sum("is the best" in first_words(s) for s in found) <= MOST


def test_sentences_agree_and_no_stated_interval_contains_0() -> None:
    """Uses differences of all sizes, with which two families of tests would often disagree."""
    stated = best = 0
    fields = [*simulated([2.5, 0.0, 1.5, 3.0], 6, 2), *simulated([0.0, 0.4, 3.0, 3.2], 6, 3)]
    for found in fields:
        last = first_words(found)
        best += "is the best" in last
        for row in found.rows:
            d = row.difference
            if d is None:
                continue
            assert d.interval is not None
            assert d.shown == (d.interval[0] > 0 or d.interval[1] < 0)
            stated += d.shown
            if found.leader in (row.name, found.baseline):
                other = found.baseline if row.name == found.leader else row.name
                assert (other in found.alike) == (not d.shown)
        if "is the best" in last and found.leader == found.baseline:
            assert all("is worse than" in line for line in section_words(found)[:-1])
    assert stated > FIELDS
    assert best > FIELDS / 20


def test_the_leader_is_compared_with_a_correction_over_all_pairs() -> None:
    losses = {"mha": [3.0, 3.1, 3.2, 3.15], "a": [1.0, 1.1, 1.2, 1.1], "b": [1.3, 1.5, 1.4, 1.4]}
    losses["c"] = [1.6, 1.5, 1.7, 1.6]
    found = section(losses)
    assert [(d.variant, d.comparisons) for d in found.rivals] == [("mha", 3), ("b", 3), ("c", 3)]
    losses["d"] = [2.6, 2.5, 2.7, 2.4]
    # a, b, c and d form 6 pairs. The pair with the baseline is one of its 4 comparisons.
    assert {d.variant: d.comparisons for d in section(losses).rivals} == {
        "mha": 4,
        "b": 6,
        "c": 6,
        "d": 6,
    }


def test_two_variants_like_the_baseline_are_not_told_apart() -> None:
    # a - b is -0.1 to within 0.001 at each seed, but neither differs from the noisy mha.
    found = section(
        {
            "mha": [2.3, 1.8, 2.2, 1.75, 2.25],
            "a": [2.0, 2.1, 2.2, 1.9, 1.8],
            "b": [2.101, 2.2, 2.299, 2.0, 1.9],
        }
    )
    assert found.leader == "a"
    assert next(d for d in found.rivals if d.variant == "b").shown
    assert set(found.alike) == {"mha", "b"}
    assert "than b" not in " ".join(section_words(found))


def test_a_lead_that_the_common_seeds_contradict_is_no_lead() -> None:
    found = section(
        {"mha": [2.00, 2.01, 2.02], "gqa": {1: 2.10, 2: 2.112, 3: 2.119, 4: 1.0, 5: 1.0}}
    )
    assert section_words(found)[0].startswith("gqa is worse than mha by 0.1003 nats")
    assert section_words(found)[1] == (
        "gqa has the lowest mean loss, but over the seeds in common mha is better: no variant "
        "is named best."
    )


def test_pairs_with_too_few_seeds_for_a_test_do_not_count_in_the_correction() -> None:
    found = section(
        {"mha": [2.0, 2.1, 2.2], "a": [2.1, 2.3, 2.2], "b": {1: 2.0}, "c": {9: 2.0, 8: 1.9}}
    )
    differences = {row.name: row.difference for row in found.rows}
    assert differences["c"] is None
    assert [d and (d.n, d.comparisons) for d in (differences["a"], differences["b"])] == [
        (3, 1),
        (1, 1),
    ]
