"""Scaling laws: exact curves, a published table, simulated ladders, and a ladder in the report."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from reporting import Page, report
from runfolders import write_run
from scipy.stats import binom, f

from gptattn.compare.ladder import (
    Ladder,
    LadderReport,
    choose_law,
    exponents_differ,
    fit_law,
    lack_of_fit,
    multipliers,
)
from gptattn.compare.table import MISSING, load_comparison, tables_across
from gptattn.compare.verdicts import ladder_words

COMPUTE = np.array([1e12, 4e12, 16e12, 64e12, 256e12])
FLOOR = 1.2
SPENDING = {"mha": 1.0, "gqa": 0.95, "mqa": 0.9}  # variants of one size differ in compute
FACTORS = {"mha": 1.0, "gqa": 1.02, "mqa": 1.05}
SAME = dict.fromkeys(FACTORS, 0.2)
APART = {"mha": 0.2, "gqa": 0.2, "mqa": 0.27}


def ladder(
    exponents: Mapping[str, float],
    deviation: float = 0.0,
    generator: np.random.Generator | None = None,
    seeds: int = 3,
) -> Ladder:
    """Return losses on exact laws, plus noise."""
    generator = generator or np.random.default_rng(0)
    compute = {name: COMPUTE * share for name, share in SPENDING.items()}
    losses = {
        name: FLOOR
        + FACTORS[name] * (compute[name][:, None] / 1e13) ** -exponents[name]
        + deviation * generator.standard_normal((len(COMPUTE), seeds))
        for name in compute
    }
    return Ladder(compute, losses)


def test_exact_laws_are_recovered() -> None:
    law = fit_law(ladder(SAME))
    assert law.floor == pytest.approx(FLOOR, abs=1e-4)
    assert law.exponents == pytest.approx(SAME, rel=1e-4)
    own = fit_law(ladder(APART), own=True)
    assert own.floor == pytest.approx(FLOOR, abs=1e-3)
    assert own.exponents == pytest.approx(APART, rel=1e-3)
    for name, c in (("mha", 1e13), ("mqa", 3e14)):
        loss = FLOOR + FACTORS[name] * (c / 1e13) ** -APART[name]
        assert own.loss(name, c) == pytest.approx(loss, abs=1e-4)


def test_the_multiplier_of_compute_by_hand() -> None:
    # A ratio of factors of 1.05 at exponent 0.2 takes 1.05 to the fifth times the compute.
    found = multipliers(ladder(SAME), "mha", loss=2.0)
    assert found["mqa"].value == pytest.approx(1.05**5, rel=1e-4)
    assert found["gqa"].value == pytest.approx(1.02**5, rel=1e-4)
    assert multipliers(ladder(SAME, seeds=1), "mha", 2.0)["gqa"].interval is None


def test_where_exponents_differ_the_multiplier_depends_on_the_loss() -> None:
    found = ladder(APART, 1e-4)
    assert exponents_differ(fit_law(found), fit_law(found, own=True), found) < 1e-6
    for loss in (2.2, 1.8):
        # By the law: C = 1e13 * (A / (loss - E)) ** (1 / alpha).
        needed = [(FACTORS[n] / (loss - FLOOR)) ** (1 / APART[n]) for n in ("mha", "mqa")]
        value = multipliers(found, "mha", loss)["mqa"].value
        assert value == pytest.approx(needed[1] / needed[0], rel=0.02)


def test_equal_exponents_are_rarely_told_apart() -> None:
    generator, ladders = np.random.default_rng(5), 120
    found = [ladder(SAME, 0.01, generator) for _ in range(ladders)]
    told = sum(exponents_differ(fit_law(one), fit_law(one, own=True), one) < 0.05 for one in found)
    assert told <= binom.ppf(0.999, ladders, 0.05)


def test_a_law_that_does_not_hold_is_detected() -> None:
    straight = ladder(SAME, 0.003)
    law = choose_law(straight)
    p, widened = lack_of_fit(law, straight) or (0, 0)
    assert p > 0.05
    # Lack of fit over pure error: 15 means, and 15 * (3 - 1) degrees of freedom of the seeds.
    pure = sum(((own - own.mean(axis=1)[:, None]) ** 2).sum() for own in straight.losses.values())
    ratio = (law.squares - pure) / (15 - law.parameters) / (pure / 30)
    assert p == pytest.approx(f.sf(ratio, 15 - law.parameters, 30))
    assert widened == pytest.approx(max(1, ratio**0.5))
    bent = {name: losses.copy() for name, losses in straight.losses.items()}
    for losses in bent.values():
        losses[-1] += 0.05  # the largest size stopped learning
    found = Ladder(straight.compute, bent)
    p, widened = lack_of_fit(choose_law(found), found) or (1, 0)
    assert p < 0.01
    assert widened > 1.5
    one = ladder(SAME, seeds=1)
    assert lack_of_fit(fit_law(one), one) is None


def test_intervals_jointly_contain_the_true_multipliers() -> None:
    """Three variants at three seeds, by the simulation of docs/evidence.md at a smaller size."""
    generator, ladders, held = np.random.default_rng(3), 120, 0
    truth = {"gqa": 1.02**5, "mqa": 1.05**5}
    for _ in range(ladders):
        found = multipliers(ladder(SAME, 0.01, generator), "mha", loss=2.0)
        ends = {name: one.interval or (0, 0) for name, one in found.items()}
        held += all(ends[name][0] <= true <= ends[name][1] for name, true in truth.items())
    assert held >= binom.ppf(0.001, ladders, 0.95)


def test_the_interval_of_a_multiplier_by_hand() -> None:
    exact = ladder(SAME, seeds=4)
    noisy = {name: own.copy() for name, own in exact.losses.items()}
    noisy["mqa"][-1] += np.array([-3.0, -1.0, 1.0, 3.0]) * 1e-4
    found = multipliers(Ladder(exact.compute, noisy), "mha", loss=2.0)["mqa"]
    low, high = found.interval or (0, 0)
    # What the fit makes of a change of that one loss, by fitting again.
    changed = {name: own.copy() for name, own in exact.losses.items()}
    changed["mqa"][-1] += 1e-3
    law = fit_law(Ladder(exact.compute, changed))
    ratio = np.log(law.factors["mqa"] / law.factors["mha"]) / law.exponents["mqa"]
    slope = (ratio - 5 * np.log(1.05)) / 1e-3
    # The size has all of the variance, so 4 - 1 degrees of freedom; of two variants it is
    # t(1 - 0.0125, 3) = 4.1765 from the table. The deviation of a mean is root of 20e-8 / 3 / 4.
    half = 4.1765 * (20e-8 / 3 / 4) ** 0.5 * abs(slope)
    assert np.log(high / low) / 2 == pytest.approx(half, rel=0.03)


def test_the_law_of_cerebras_gpt() -> None:
    """Dey et al. 2023, arXiv:2304.03208: L = (f / 5.984e22)^-0.0737 + 0.5066 (sec. 3.1).

    Losses on the Pile and FLOPs are those of the model card's table, rounded, and without the
    correction for the vocabulary that the paper's own fit has.
    """
    flops = np.array([2.6e18, 1.3e19, 6.1e19, 2.8e20, 1.1e21, 6.3e21, 2.3e22])
    losses = np.array([2.566, 2.299, 2.184, 1.996, 1.834, 1.704, 1.572])
    table = Ladder({"gpt": flops}, {"gpt": losses[:, None]})
    law = fit_law(table.part(6))  # as in the paper, the largest model is predicted
    assert law.floor == pytest.approx(0.5066, abs=0.02)
    assert law.exponents["gpt"] == pytest.approx(0.0737, abs=0.006)
    assert law.loss("gpt", flops[-1]) == pytest.approx(losses[-1], rel=0.02)
    # Least squares: no other law is nearer to the losses, also not the published one.
    published = (flops[:6] / 5.984e22) ** -0.0737 + 0.5066
    assert law.squares < float(((published - losses[:6]) ** 2).sum())


FLOPS = {"mha": 1000.0, "gqa": 900.0}  # per token and layer
STEPS = (100, 400, 1600, 6400, 25600)
TOKENS = 16 * 32  # of a step


def write_ladder(
    folder: Path,
    sizes: int = 5,
    bend: float = 0.0,
    rise: float = 0.0,
    idle: Sequence[str] = (),
) -> Path:
    """Write runs that follow L = 1 + (C / 1e9)^-0.25, times 1.1 for gqa, plus noise.

    `bend` lifts the middle sizes off it. The losses of `idle` variants rise by `rise` with each
    size instead.
    """
    generator = np.random.default_rng(0)
    for size in range(sizes):
        for variant, flops in {**FLOPS, **{name: FLOPS.get(name, 950.0) for name in idle}}.items():
            compute = flops * (size + 1) * STEPS[size] * TOKENS
            loss = 1.0 + (1.1 if variant == "gqa" else 1.0) * (compute / 1e9) ** -0.25
            loss += bend * (size % 2)
            loss = 9 + rise * size if variant in idle else loss
            for seed in (1, 2, 3):
                noise = seed if variant in idle else generator.standard_normal()
                write_run(
                    folder / f"{variant}_{size}_{seed}",
                    variant,
                    seed,
                    loss + 0.001 * noise,
                    metrics={
                        "cost/flops_per_token": flops * (size + 1),
                        "cost/kv_bytes_per_token": 1024.0 * (size + 1) / (1 + (variant == "gqa")),
                        "perf/tokens_per_s": 5000.0 / (size + 1),
                    },
                    config={
                        "batch_size": 16,
                        "model": {"context_length": 32, "num_layers": size + 1, "d_model": 8},
                        "budget": {"tokens": STEPS[size] * TOKENS, "default_steps": 1000},
                    },
                    summary={"steps": STEPS[size]},
                )
    return folder


def ladder_of(folder: Path) -> LadderReport:
    (found,) = load_comparison(folder).ladders
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ladder(tmp_path_factory.mktemp("ladder"))


def test_multipliers_recover_the_laws_that_made_the_losses(folder: Path) -> None:
    found = ladder_of(folder)
    compute, cache, seconds = found.costs
    assert [compute.cost, cache.cost, seconds.cost] == ["compute", "cache", "seconds"]
    # (1.1 / 1.0) ** (1 / 0.25): the same loss at 1.4641 times the compute.
    value, (low, high) = (m := compute.multipliers["gqa"]).value, m.interval or (0, 0)
    assert low <= 1.4641 <= high
    assert value == pytest.approx(1.4641, rel=0.03)
    assert compute.law.floor == pytest.approx(1.0, abs=0.03)
    # Of the same tokens/s: a variant's seconds are the baseline's at one size.
    assert seconds.ladder.compute["gqa"] == pytest.approx(seconds.ladder.compute["mha"])
    assert cache.ladder.compute["gqa"] * 2 == pytest.approx(cache.ladder.compute["mha"])
    words = ladder_words(found)
    said = f"gqa needs {value:.2f} ({low:.2f} to {high:.2f}) times the compute of mha for the same"
    assert words[0] == f"{said} loss."
    assert words[1].startswith("gqa needs 0.")
    assert "times the cache per token of mha" in words[1]
    assert "times the seconds of training of mha" in words[2]
    assert words[3].startswith("The law through the 4 smaller sizes misses the losses of the larg")
    assert any("With 4 times the compute of the largest it gives " in line for line in words)
    (table,) = tables_across(load_comparison(folder))
    heading, mha, gqa = table.cells
    assert heading[:4] == ["variant", "compute", "cache", "seconds"]
    assert mha[:2] == ["mha", MISSING]
    assert gqa[1] == f"{value:.2f} ({low:.2f} to {high:.2f})"


def test_a_law_that_fails_is_not_extrapolated(folder: Path, tmp_path: Path) -> None:
    bent = ladder_of(write_ladder(tmp_path, bend=0.02))
    found = bent.costs[0]
    assert found.beyond is None
    assert found.widened > 5
    assert ladder_of(folder).costs[0].widened < 2
    low, high = found.multipliers["gqa"].interval or (0, 0)
    assert low <= 1.4641 <= high
    words = ladder_words(bent)
    assert any("intervals are widened by" in line and "nothing is extra" in line for line in words)
    assert not any("an extrapolation" in line for line in words)


@pytest.mark.parametrize(
    ("sizes", "rise", "idle"), [(5, 0.0, [*FLOPS]), (5, 0.01, [*FLOPS]), (3, 0.0, [])]
)
def test_losses_that_do_not_fall_and_three_sizes_are_no_ladder(
    sizes: int, rise: float, idle: Sequence[str], tmp_path: Path
) -> None:
    assert load_comparison(write_ladder(tmp_path, sizes, rise=rise, idle=idle)).ladders == []


@pytest.mark.parametrize("rise", [0.0, 0.01])
def test_a_variant_that_does_not_learn_is_named_and_the_others_are_a_ladder(
    rise: float, folder: Path, tmp_path: Path
) -> None:
    found = ladder_of(write_ladder(tmp_path, rise=rise, idle=["mqa"]))
    whole = ladder_of(folder)
    for ours, theirs in zip(found.costs, whole.costs, strict=True):
        assert dict(ours.multipliers) == dict(theirs.multipliers)
    line = "Left out, as the same loss would take more than 1,000 times the compute of mha: mqa."
    assert [one for one in ladder_words(found) if one not in ladder_words(whole)] == [line]


@pytest.mark.usefixtures("undrawn")
def test_table_page_json_and_plots_have_the_ladder(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report(folder, "--out", tmp_path)
    said = ladder_words(ladder_of(folder))[0]
    assert said.split(" for ")[0] in " ".join(capsys.readouterr().out.split())
    assert said in Page(tmp_path / "comparison.html").text
    node = json.loads((tmp_path / "comparison.json").read_text())["ladders"][0]
    assert node["costs"][0]["multipliers"]["gqa"]["value"] == pytest.approx(1.464, rel=0.03)
    plots = {f"ladder_{cost}" for cost in ("compute", "cache", "seconds")}
    assert {file.stem for file in tmp_path.glob("ladder_*.svg")} == plots
    report(write_run(tmp_path / "runs" / "one", "mha", 1, 2.0), "--out", tmp_path)
    assert not [*tmp_path.glob("*.svg")]
