"""What the page gets of each plot: the same points, small, in order, and finite."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from reporting import Page, report
from runfolders import write_run, write_sweep

from gptattn.compare.chart import Chart, Series, packed
from gptattn.compare.curves import POINTS
from gptattn.compare.plot_style import MARKERS

MOST_BYTES = 1_500_000  # of a page of twenty runs


def charts_of(page: Page) -> dict[str, list[dict]]:
    return {figure["title"]: figure["charts"] for figure in page.charts}


def test_points_are_sorted_finite_and_share_equal_x() -> None:
    a = Series(
        "a", "#000000", x=[3.0, 1.0, 1.0, math.nan, 2.0], y=[30.0, 10.0, 11.0, 1.0, math.inf]
    )
    b = Series("b", "#000000", x=[1.0, 3.0], y=[5.0, 6.0], low=[math.nan, 5.5], high=[7.0, 6.5])
    node = packed(Chart("figure", "choice", "x", "y", [a, b], front=[(1.0, 5.0), (3.0, 6.0)]))
    assert node["xs"] == [[1, 3]]
    first, second = node["series"]
    assert (first["xs"], first["y"]) == (0, [10, 30])
    assert (second["xs"], second["low"], second["high"]) == (0, [None, 5.5], [7, 6.5])
    assert "low" not in first
    assert node["front"] == [[1, 3], [5, 6]]
    json.dumps(node, allow_nan=False)


def test_marked_points_of_equal_x_are_all_there_side_by_side() -> None:
    marked = Series("a", "#000", [64, 64, 128], [3.0, 2.0, 1.0], marker="o")
    found = packed(Chart("f", "c", "x", "y", [marked]))
    assert found["xs"] == [[64, 64.000064, 128.000256]]
    assert found["series"][0]["y"] == [3, 2, 1]


def test_numbers_keep_what_a_reader_sees() -> None:
    series = Series("a", "#000000", x=[1_234_567_890.0], y=[2.34567891])
    node = packed(Chart("figure", "choice", "x", "y", [series]))
    assert node["xs"] == [[1_234_567_890]]
    assert f"{node['series'][0]['y'][0]:.4f}" == "2.3457"


def test_the_page_can_draw_every_marker() -> None:
    script = (Path(__file__).parents[2] / "gptattn" / "compare" / "page.js").read_text("utf-8")
    drawn = script.partition("const MARKERS = {")[2].partition("};")[0]
    letters = {line.strip().partition(":")[0].strip('"') for line in drawn.strip().splitlines()}
    assert letters == set(MARKERS)


@pytest.mark.usefixtures("undrawn")
def test_every_plot_has_its_chart(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "runs", {"mha": [2.0, 2.1, 2.2], "gqa": [2.3, 2.4, 2.6]})
    report(sweep)
    charts = charts_of(Page(sweep / "comparison" / "comparison.html"))
    assert {title: [chart["choice"] for chart in own] for title, own in charts.items()} == {
        "Loss over training": ["tokens", "FLOPs", "seconds"],
        "Loss against cost": ["parameters", "cache bytes", "FLOPs", "tokens/s"],
    }
    mha, gqa = charts["Loss over training"][0]["series"]
    assert mha["y"][-1] == pytest.approx(2.1)
    assert gqa["high"][-1] - gqa["y"][-1] == pytest.approx(gqa["y"][-1] - gqa["low"][-1], rel=1e-4)
    assert [series["filled"] for series in charts["Loss against cost"][0]["series"]] == [
        True,
        False,
    ]


def test_twenty_long_runs_fit_into_a_small_page(tmp_path: Path) -> None:
    # Two seeds each take most room: they are drawn themselves, beside their mean.
    variants, seeds = 10, 2
    rng = np.random.default_rng(0)
    for i in range(variants * seeds):
        run = write_run(tmp_path / f"{i}", f"variant_{i % variants}", i // variants, 2 + i / 100)
        losses = 2 + i / 100 + 2 * np.exp(-np.arange(500) / 100) + rng.normal(0, 0.02, 500)
        seconds = np.cumsum(rng.uniform(0.5, 0.6, 500))
        rows = [
            {"step": step, "val/loss": loss, "time": 1.0, "progress/seconds": second}
            | {"progress/tokens": 2048 * step, "progress/flops": 1.5e9 * step}
            for step, (loss, second) in enumerate(zip(losses, seconds, strict=True), start=1)
        ]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (run / "metrics.jsonl").write_text(lines, encoding="utf-8")
    report(tmp_path)
    page = Page(tmp_path / "comparison" / "comparison.html")
    assert len(page.source.encode()) < MOST_BYTES
    (curves,) = (own for title, own in charts_of(page).items() if "training" in title)
    assert len(curves[0]["series"]) == variants
    assert all(len(each["seeds"]) == 2 and "low" not in each for each in curves[0]["series"])
    # Nothing is thinned once more on the way to the page.
    assert {len(series["y"]) for chart in curves for series in chart["series"]} == {POINTS}
