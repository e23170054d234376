"""The report's files: their contents, and that they need no other files and run nothing."""

import csv
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from reporting import LOSSES, page_text, report
from runfolders import write_run, write_sweep

from gptattn.compare.table import load_comparison
from gptattn.runs.folder import RunFolder

PLOTS = (
    *("forest_loss", "loss_tokens", "loss_flops"),
    *("pareto_params", "pareto_cache", "pareto_flops"),
)
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep with its report in `comparison/`. Tests must not change it."""
    folder = write_sweep(tmp_path_factory.mktemp("sweep") / "runs", LOSSES)
    report(folder)
    return folder


def test_the_folder_holds_the_page_its_figures_and_its_numbers(sweep):
    found = {
        path.name for path in (sweep / "comparison").glob("[!.]*") if "tfevents" not in path.name
    }
    plots = {f"{name}.{kind}" for name in PLOTS for kind in ("png", "svg")}
    assert found == plots | {"comparison.csv", "comparison.html", *LOSSES}  # runs of TensorBoard
    for name in PLOTS:
        root = ET.parse(sweep / "comparison" / f"{name}.svg").getroot()
        assert root.tag == f"{SVG}svg"
        texts = {"".join(node.itertext()) for node in root.iter(f"{SVG}text")}
        shown = {*LOSSES} - {"mha"} if name == "forest_loss" else {*LOSSES}
        assert shown <= texts  # text, not paths: it can be searched
        assert (sweep / "comparison" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    page = (sweep / "comparison" / "comparison.html").read_text(encoding="utf-8")
    assert """content="default-src 'none'; style-src 'unsafe-inline'">""" in page
    assert not re.search(r"""(?:src|href|srcset)=["'](?!#)|url\((?!#)|@import""", page)


def test_comparison_and_csv_hold_what_was_worked_out_by_hand(sweep):
    found = load_comparison(sweep)
    _, gqa, _ = rows = found.sections[0].rows
    # Differences 0.11, 0.12, 0.13, 0.12, 0.12: deviation root of 0.0002 / 4. Two comparisons:
    # t(1 - 0.0125, 4) = 3.4954 from the table.
    half = 3.4954 * (0.0002 / 4) ** 0.5 / 5**0.5
    assert gqa.difference.mean == pytest.approx(0.12)
    assert gqa.difference.interval == pytest.approx((0.12 - half, 0.12 + half), abs=1e-6)
    assert gqa.difference.comparisons == 2
    # All cost the same, so only the lowest loss is on the front.
    assert [row.fronts for row in rows] == [["params", "cache", "flops"], [], []]
    table = found.table().set_index("variant")
    assert [*table.index] == ["mha", "gqa", "mqa"]
    row = table.loc["gqa"]
    assert row["difference high"] == pytest.approx(0.12 + half, abs=1e-6)
    # t(0.975, 4) = 2.776445 from the table.
    half = 2.776445 * np.std(LOSSES["gqa"], ddof=1) / 5**0.5
    assert (row["val/loss"], row["n"]) == (pytest.approx(2.14), 5)
    assert row["val/loss high"] == pytest.approx(2.14 + half, abs=1e-6)
    assert table.loc["mqa", "cost/kv_bytes_per_token"] == 1024
    with (sweep / "comparison" / "comparison.csv").open(newline="") as file:
        first, second, _ = csv.DictReader(file)
    assert (first["difference"], second["comparisons"]) == ("", "2")
    assert float(second["difference"]) == pytest.approx(0.12)


@pytest.mark.parametrize(
    ("accuracies", "fronts"),
    [((), ["params cache flops", "params", ""]), ((0.5, 0.9, 0.4), ["", "params cache flops", ""])],
)
def test_the_fronts_prefer_low_costs_and_on_a_task_high_accuracy(accuracies, fronts, tmp_path):
    task = [{"val/accuracy": one, "val/bits_per_byte": None} for one in accuracies] or [{}] * 3
    write_run(tmp_path / "a", "mha", 1, 2.0, metrics=task[0])
    write_run(tmp_path / "b", "gqa", 1, 2.1, metrics={"cost/params": 900} | task[1])
    write_run(tmp_path / "c", "mqa", 1, 2.2, metrics=task[2])
    assert [*load_comparison(tmp_path).table()["pareto"]] == fronts


@pytest.mark.usefixtures("undrawn")
def test_a_second_report_replaces_the_first_and_only_its_files(tmp_path):
    sweep = write_sweep(tmp_path / "runs", LOSSES)
    out = sweep / "comparison"
    report(sweep)
    for name in ("loss_teaser.png", "2_loss.svg", "loss_seconds.png"):
        (out / name).write_text("mine")
    for file in [*sweep.glob("mqa*/summary.json"), *sweep.glob("*/metrics.jsonl")]:
        file.unlink()
    report(sweep)
    assert {path.name for path in out.glob("*loss*")} == {
        *("loss_teaser.png", "2_loss.svg"),
        *("forest_loss.svg", "forest_loss.png"),  # of the report that is there now
    }
    assert (out / "pareto_cache.svg").exists()


def test_markdown_and_no_files_write_nothing(sweep, tmp_path, capsys):
    report(sweep, "markdown=true", f"out={tmp_path / 'out'}")
    shown = capsys.readouterr().out
    assert shown.startswith("| variant | n | val loss | vs mha |")
    assert "| mqa | 5 |" in shown
    report(sweep, "files=false", f"out={tmp_path / 'out'}")
    assert "gqa is worse than mha by 0.1200 nats" in " ".join(capsys.readouterr().out.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("undrawn")
def test_damage_and_failures_are_named_on_the_console_and_on_the_page(tmp_path, capsys):
    sweep = write_sweep(tmp_path / "runs", {"mha": [2.0, 2.1], "gqa": [1.0, 1.1]})
    (sweep / "mha_s1" / "metrics.jsonl").write_text("{")
    (sweep / "mha_s2" / "metrics.jsonl").unlink()
    (sweep / "gqa_s1" / "summary.json").write_text("{")
    (write_run(sweep / "mqa_s1", "mqa", 1, 2.0) / "summary.json").unlink()
    RunFolder(sweep / "mqa_s1").write_failure(5, "loss is NaN")
    report(sweep)
    errors, text = capsys.readouterr().err, page_text(sweep / "comparison" / "comparison.html")
    for part in ("mha_s1: metrics.jsonl is", "mha_s2: has no", "gqa_s1: summary.json is", "NaN"):
        assert part in errors
        assert part in text
