"""The report's files: their contents, and that they need no other files."""

import csv
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from reporting import LOSSES, NAMES, Page, report
from runfolders import write_sweep
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gptattn.compare.comparison import COSTS


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep with its report in `comparison/`, bands beside it. Tests must not change it."""
    folder = write_sweep(tmp_path_factory.mktemp("sweep") / "runs", LOSSES)
    report(folder, "--board", folder.parent / "bands")
    return folder


def test_the_folder_holds_the_page_its_figures_and_its_numbers(sweep: Path) -> None:
    found = {path.name for path in (sweep / "comparison").iterdir()}
    plots = {f"{name}.{kind}" for name in (*NAMES, "pareto_speed") for kind in ("png", "svg")}
    assert found == plots | {f"comparison.{k}" for k in ("csv", "json", "html")}
    for name in NAMES:
        root = ET.parse(sweep / "comparison" / f"{name}.svg").getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        texts = {"".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")}
        assert set(LOSSES) <= texts  # text, not paths: it can be searched
        assert (sweep / "comparison" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_needs_nothing_but_itself(sweep: Path) -> None:
    page = Page(sweep / "comparison" / "comparison.html")
    assert all(reference.startswith("#") for reference in page.references)
    assert set(re.findall(r"url\(([^)]*)\)", page.source)) <= {f"#{name}" for name in page.ids}
    assert {reference[1:] for reference in page.references} <= set(page.ids)
    assert page.runs_no_script()
    assert not {"link", "img", "iframe", "object"} & set(page.tags)
    assert page.tags.count("svg") == 7
    assert "@import" not in page.source


def test_json_and_csv_hold_what_was_worked_out_by_hand(sweep: Path) -> None:
    (found,) = json.loads((sweep / "comparison" / "comparison.json").read_text())["sections"]
    mha, gqa, _ = found["rows"]
    assert mha["metrics"]["val/loss"]["mean"] == pytest.approx(2.02)
    # Differences 0.11, 0.12, 0.13, 0.12, 0.12: deviation root of 0.0002 / 4. Two comparisons:
    # t(1 - 0.0125, 4) = 3.4954 from the table.
    half = 3.4954 * (0.0002 / 4) ** 0.5 / 5**0.5
    assert gqa["difference"]["mean"] == pytest.approx(0.12)
    assert gqa["difference"]["interval"] == pytest.approx([0.12 - half, 0.12 + half], abs=1e-6)
    assert gqa["difference"]["comparisons"] == 2
    assert [run["seed"] for run in gqa["runs"]] == [1, 2, 3, 4, 5]
    # All cost the same, so only the lowest loss is on the front.
    assert [row["fronts"] for row in found["rows"]] == [[*COSTS], [], []]
    with (sweep / "comparison" / "comparison.csv").open(newline="") as file:
        first, second, third = csv.DictReader(file)
    assert [line["variant"] for line in (first, second, third)] == ["mha", "gqa", "mqa"]
    assert float(second["difference"]) == pytest.approx(0.12)
    assert (first["difference"], second["comparisons"]) == ("", "2")


def test_tensorboard_shows_mean_and_band(sweep: Path) -> None:
    board = sweep.parent / "bands"
    lines = ("mean", "lower", "upper")
    assert {p.name for p in board.iterdir()} == {f"{v} {k}" for v in LOSSES for k in lines}
    values = {}
    for line in lines:
        events = EventAccumulator(str(board / f"gqa {line}"))
        events.Reload()
        assert set(events.Tags()["scalars"]) == {"val/loss", "train/loss", "val/bits_per_byte"}
        last = events.Scalars("val/loss")[-1]
        # The run's clock starts at 1000 and takes half a second per step.
        assert (last.step, last.wall_time) == (100, pytest.approx(1050.0))
        values[line] = last.value
    losses = np.array(LOSSES["gqa"])
    # t(0.975, 4) = 2.776445 from the table.
    half = 2.776445 * losses.std(ddof=1) / np.sqrt(5)
    assert values["mean"] == pytest.approx(losses.mean())
    assert values["upper"] - values["mean"] == pytest.approx(half, rel=1e-4)
    assert values["mean"] - values["lower"] == pytest.approx(half, rel=1e-4)


@pytest.mark.usefixtures("undrawn")
def test_a_second_report_replaces_the_first_and_only_its_files(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "runs", LOSSES)
    out, board = sweep / "comparison", tmp_path / "bands"
    report(sweep, "--board", board)
    (out / "notes.txt").write_text("mine")
    (board / "mine").mkdir()
    (board / "mine" / "events.out.tfevents.1.host").write_text("mine")
    for file in [*sweep.glob("mqa*/summary.json"), *sweep.glob("*/metrics.jsonl")]:
        file.unlink()
    report(sweep, "--board", board)
    assert not list(out.glob("loss_*"))
    assert (out / "pareto_cache.svg").exists()
    assert (out / "notes.txt").exists()
    assert [path.name for path in board.iterdir()] == ["mine"]


@pytest.mark.usefixtures("undrawn")
def test_a_split_report_has_plots_and_board_of_each_set(tmp_path: Path) -> None:
    write_sweep(tmp_path / "a", LOSSES)
    write_sweep(tmp_path / "b", LOSSES, data={"text_sha256": "zyxwvuts"})
    out, board = tmp_path / "out", tmp_path / "bands"
    report(tmp_path / "a", tmp_path / "b", "--out", out, code=2)
    assert not out.exists()
    report(tmp_path / "a", tmp_path / "b", "--split", "--out", out, "--board", board)
    page = Page(out / "comparison.html")
    assert "2 separate comparisons" in page.text
    assert "The runs differ in data (text" in page.text
    assert page.tags.count("svg") == 14
    assert len(set(page.ids)) == len(page.ids)
    assert len(list(out.glob("?_loss_tokens.svg"))) == 2
    assert {path.name for path in board.iterdir()} == {"text abcdefgh", "text zyxwvuts"}


def test_markdown_and_no_files_write_nothing(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    report(sweep, "--markdown", "--out", tmp_path / "out")
    shown = capsys.readouterr().out
    assert shown.startswith("| variant | n | val loss | vs mha |")
    assert "| mqa | 5 |" in shown
    report(sweep, "--no-files", "--out", tmp_path / "out")
    assert "gqa is worse than mha by 0.1200 nats" in " ".join(capsys.readouterr().out.split())
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_an_error_in_one_line(
    sweep: Path, capsys: pytest.CaptureFixture
) -> None:
    report(sweep, "--out", sweep / "mha_s1" / "config.yaml", code=7)
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("error: --out: ")


@pytest.mark.usefixtures("undrawn")
def test_damage_is_named_on_the_console_and_on_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    sweep = write_sweep(tmp_path / "runs", {"mha": [2.0, 2.1], "gqa": [1.0, 1.1]})
    (sweep / "mha_s1" / "metrics.jsonl").write_text("{")
    (sweep / "mha_s2" / "metrics.jsonl").unlink()
    (sweep / "gqa_s1" / "summary.json").write_text("{")
    report(sweep)
    errors, text = capsys.readouterr().err, Page(sweep / "comparison" / "comparison.html").text
    for part in (
        "mha_s1: metrics.jsonl is damaged",
        "mha_s2: has no metrics.jsonl",
        "gqa_s1: summary.json is damaged or half-written",
    ):
        assert part in errors
        assert part in text


def test_a_mistake_is_reported_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys; from gptattn.cli.commands.compare import main\n"
        "try:\n    main()\nexcept SystemExit: pass\n"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "none")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    heavy = {"pandas", "scipy", "matplotlib", "tensorboard", "jinja2", "torch", "lightning"}
    assert not set(done.stdout.splitlines()[-1].split()) & heavy
