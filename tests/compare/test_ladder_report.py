"""A ladder of sizes in the report: multipliers, prediction, words, table, plots and JSON."""

import json
from pathlib import Path

import numpy as np
import pytest
from reporting import Page, compared, report
from runfolders import write_run

from gptattn.compare.ladder import LadderReport
from gptattn.compare.table import MISSING, tables_across
from gptattn.compare.verdicts import ladder_words

FLOPS = {"mha": 1000.0, "gqa": 900.0}  # per token and layer
FLOOR, EXPONENT = 1.0, 0.25
FACTORS = {"mha": 1.0, "gqa": 1.1}
STEPS = (100, 400, 1600, 6400, 25600)
TOKENS = 16 * 32  # of a step


def spent(variant: str, size: int) -> float:
    return FLOPS[variant] * (size + 1) * STEPS[size] * TOKENS


def loss(variant: str, size: int) -> float:
    return FLOOR + FACTORS[variant] * (spent(variant, size) / 1e9) ** -EXPONENT


def write_ladder(folder: Path, sizes: int = 5, deviation: float = 0.001, bend: float = 0.0) -> Path:
    """Write runs that follow the law, plus noise; `bend` lifts the middle sizes off it."""
    generator = np.random.default_rng(0)
    for size in range(sizes):
        for variant in FLOPS:
            for seed in (1, 2, 3):
                noise = deviation * generator.standard_normal() + bend * (size % 2)
                write_run(
                    folder / f"{variant}_{size}_{seed}",
                    variant,
                    seed,
                    loss(variant, size) + noise,
                    metrics={
                        "cost/flops_per_token": FLOPS[variant] * (size + 1),
                        "cost/kv_bytes_per_token": 1024.0 * (size + 1) / (1 + (variant == "gqa")),
                        "perf/tokens_per_s": 5000.0 / (size + 1),
                    },
                    config={
                        "batch_size": 16,
                        "model": {"context_length": 32, "num_layers": size + 1, "d_model": 8},
                        "budget": {"tokens": STEPS[size] * TOKENS, "default_steps": 1000},
                    },
                    steps=STEPS[size],
                )
    return folder


def ladder_of(folder: Path) -> LadderReport:
    (found,) = compared(folder).ladders
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ladder(tmp_path_factory.mktemp("ladder"))


def test_multipliers_recover_the_laws_that_made_the_losses(folder: Path) -> None:
    found = ladder_of(folder)
    compute, cache, seconds = found.costs
    assert [compute.cost, cache.cost, seconds.cost] == ["compute", "cache", "seconds"]
    # (1.1 / 1.0) ** (1 / 0.25): the same loss at 1.4641 times the compute.
    low, high = compute.multipliers["gqa"].interval or (0, 0)
    assert low <= 1.4641 <= high
    assert compute.multipliers["gqa"].value == pytest.approx(1.4641, rel=0.03)
    assert compute.law.floor == pytest.approx(FLOOR, abs=0.03)
    # Of the same tokens/s: a variant's seconds are the baseline's at one size.
    assert seconds.ladder.compute["gqa"] == pytest.approx(seconds.ladder.compute["mha"])
    assert cache.ladder.compute["gqa"] * 2 == pytest.approx(cache.ladder.compute["mha"])


def test_words_and_cells_say_what_a_variant_needs(folder: Path) -> None:
    found = ladder_of(folder)
    words = ladder_words(found)
    value, (low, high) = (m := found.costs[0].multipliers["gqa"]).value, m.interval or (0, 0)
    said = f"gqa needs {value:.2f} ({low:.2f} to {high:.2f}) times the compute of mha for the same"
    assert words[0] == f"{said} loss."
    assert words[1].startswith("gqa needs 0.")
    assert "times the cache per token of mha" in words[1]
    assert "times the seconds of training of mha" in words[2]
    assert words[3].startswith("The law through the 4 smaller sizes misses the losses of the larg")
    assert any("With 4 times the compute of the largest it gives " in line for line in words)
    (table,) = tables_across(compared(folder))
    heading, mha, gqa = table.cells
    assert heading[:4] == ["variant", "compute", "cache", "seconds"]
    assert mha[:2] == ["mha", MISSING]
    assert gqa[1] == f"{value:.2f} ({low:.2f} to {high:.2f})"


def test_a_law_that_fails_is_not_extrapolated(tmp_path: Path) -> None:
    straight, bent = write_ladder(tmp_path / "a"), write_ladder(tmp_path / "b", bend=0.02)
    found, plain = ladder_of(bent).costs[0], ladder_of(straight).costs[0]
    assert found.beyond is None
    assert found.widened > 5
    assert plain.widened < 2
    low, high = found.multipliers["gqa"].interval or (0, 0)
    assert low <= 1.4641 <= high
    words = ladder_words(ladder_of(bent))
    assert any("intervals are widened by" in line and "nothing is extra" in line for line in words)
    assert not any("an extrapolation" in line for line in words)


@pytest.mark.parametrize("rise", [0.0, 0.01])
def test_losses_that_do_not_fall_are_no_ladder(rise: float, tmp_path: Path) -> None:
    folder = write_ladder(tmp_path)
    for file in folder.glob("*/summary.json"):
        summary = json.loads(file.read_text())
        size = int(file.parent.name.split("_")[1])
        summary["metrics"]["val/loss"] = 5 + rise * size + 0.001 * summary["seed"]
        file.write_text(json.dumps(summary))
    assert compared(folder).ladders == []


def test_three_sizes_are_no_ladder(tmp_path: Path) -> None:
    assert compared(write_ladder(tmp_path, sizes=3)).ladders == []


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
    assert {file.stem for file in tmp_path.glob("ladder_*.svg")} == {
        "ladder_compute",
        "ladder_cache",
        "ladder_seconds",
    }
