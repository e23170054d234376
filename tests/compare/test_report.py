"""The report's files: their contents, and that they need no other files and run nothing."""

import csv
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from reporting import LOSSES, Page, report
from runfolders import curve_rows, write_rows, write_run, write_sweep
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gptattn.compare.comparison import COSTS
from gptattn.compare.report import csv_text
from gptattn.compare.table import load_comparison
from gptattn.runs.evaluation import Basis, CacheLoss, Evaluation
from gptattn.runs.folder import RunFolder
from gptattn.runs.sweep_states import write_planned

LOSS_PLOTS = ("loss_tokens", "loss_flops", "loss_seconds")
OF_OTHERS = ("forest_loss", "loss_gap")  # the baseline has no curve or row there
PLOTS = (*OF_OTHERS, *LOSS_PLOTS, "pareto_params", "pareto_cache", "pareto_flops", "pareto_speed")
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep with its report in `comparison/`, bands beside it. Tests must not change it."""
    folder = write_sweep(tmp_path_factory.mktemp("sweep") / "runs", LOSSES)
    report(folder, "--board", folder.parent / "bands")
    return folder


def test_the_folder_holds_the_page_its_figures_and_its_numbers(sweep: Path) -> None:
    found = {path.name for path in (sweep / "comparison").iterdir()}
    plots = {f"{name}.{kind}" for name in PLOTS for kind in ("png", "svg")}
    assert found == plots | {f"comparison.{k}" for k in ("csv", "json", "html")}
    for name in PLOTS:
        root = ET.parse(sweep / "comparison" / f"{name}.svg").getroot()
        assert root.tag == f"{SVG}svg"
        texts = {"".join(node.itertext()) for node in root.iter(f"{SVG}text")}
        assert {*LOSSES} - (
            {"mha"} if name in OF_OTHERS else set()
        ) <= texts  # text, not paths: it can be searched
        assert (sweep / "comparison" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_json_csv_and_table_hold_what_was_worked_out_by_hand(sweep: Path) -> None:
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
    table = load_comparison(sweep).table().set_index("variant")
    assert list(table.index) == ["mha", "gqa", "mqa"]
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


def test_the_fronts_prefer_low_costs_and_high_speed(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "mha", 1, 2.0, metrics={"perf/tokens_per_s": 1000.0})
    small = {"perf/tokens_per_s": 2000.0, "cost/params": 900}
    write_run(tmp_path / "b", "gqa", 1, 2.1, metrics=small)
    write_run(tmp_path / "c", "mqa", 1, 2.2, metrics={"perf/tokens_per_s": 500.0})
    table = load_comparison(tmp_path).table()
    assert dict(zip(table["variant"], table["pareto"], strict=True)) == {
        "mha": "params cache flops speed",
        "gqa": "params speed",
        "mqa": "",
    }


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
    for name in ("notes.txt", "loss_teaser.png", "2_loss.svg"):
        (out / name).write_text("mine")
    (board / "mine").mkdir()
    (board / "empty" / "later").mkdir(parents=True)
    (board / "mine" / "events.out.tfevents.1.host").write_text("mine")
    for file in [*sweep.glob("mqa*/summary.json"), *sweep.glob("*/metrics.jsonl")]:
        file.unlink()
    report(sweep, "--board", board)
    assert {path.name for path in out.glob("*loss*")} == {
        *("loss_teaser.png", "2_loss.svg"),
        *("forest_loss.svg", "forest_loss.png"),  # of the report that is there now
    }
    assert (out / "pareto_cache.svg").exists()
    assert (out / "notes.txt").exists()
    assert {path.relative_to(board).as_posix() for path in board.rglob("*") if path.is_dir()} == {
        *("mine", "empty", "empty/later")
    }


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
    assert page.tags.count("svg") == 18
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
def test_damage_and_open_runs_are_named_on_the_console_and_on_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    sweep = write_sweep(tmp_path / "runs", {"mha": [2.0, 2.1], "gqa": [1.0, 1.1]})
    (sweep / "mha_s1" / "metrics.jsonl").write_text("{")
    (sweep / "mha_s2" / "metrics.jsonl").unlink()
    (sweep / "gqa_s1" / "summary.json").write_text("{")
    write_planned(sweep, ["mha_s1", "mha_s2", "mqa_s1_000004"])
    report(sweep)
    errors, text = capsys.readouterr().err, Page(sweep / "comparison" / "comparison.html").text
    for part in (
        "mha_s1: metrics.jsonl is damaged",
        "mha_s2: has no metrics.jsonl",
        "gqa_s1: summary.json is damaged or half-written",
        "2 of 3 runs are done",
    ):
        assert part in errors
        assert part in text


HOSTILE = '<script>alert("1")</script>&{{ 7 * 7 }}$\\frac$]]>--><!--'
INJECTIONS = (
    HOSTILE,
    "\" onmouseover=\"alert(1)' onfocus='alert(1)' autofocus='",
    "$\\input{/etc/passwd}$",
    "[red]bold[/red]",
    "=1+1",
)


def test_text_of_runs_is_inert_in_every_file_and_the_page_needs_nothing_but_itself(
    tmp_path: Path,
) -> None:
    sweep, board = tmp_path / "<img src=x>", tmp_path / "bands"
    for seed in (1, 2):
        for i, text in enumerate(("mha", *INJECTIONS)):
            run = write_run(
                sweep / f"<b>{i}_{seed}",
                text,
                seed,
                2.0 + seed / 100,
                config={"optim": {"name": text, text: 1}},
                environment={"device": text, text: text},
                data={"tokenizer": " ".join(INJECTIONS)},
            )
            write_rows(run, curve_rows(2.0))
            caches = {"full": CacheLoss(2.0, 64), text: CacheLoss(2.1, 32)}
            basis = Basis("weights", "text", "code", "cpu")
            RunFolder(run).write_evaluation(Evaluation(basis, 1000, 128, caches=caches))
    (write_run(sweep / "<u>", "mha", 8, 2.0) / "summary.json").write_text("{")
    report(sweep, "--board", board)
    page = Page(sweep / "comparison" / "comparison.html")
    foreign = {"img", "i", "b", "u", "iframe", "a", "object", "link", "embed", "form", "script"}
    assert {"head", "title", "main", "section", "svg"} <= set(page.tags)
    assert not foreign & set(page.tags)
    policy = """content="default-src 'none'; style-src 'unsafe-inline'">"""
    assert f'<meta http-equiv="Content-Security-Policy" {policy}' in page.source
    assert {*page.references} <= {f"#{name}" for name in page.ids}
    assert {*re.findall(r"url\(([^)]*)\)", page.source)} <= {f"#{name}" for name in page.ids}
    assert "@import" not in page.source
    assert not re.search(r"<[^>]* on\w+=", page.source)
    assert HOSTILE in page.text
    assert "<u>" in page.text
    for svg in (sweep / "comparison").glob("*.svg"):
        names = {node.tag.rpartition("}")[2] for node in ET.parse(svg).getroot().iter()}
        assert not {"script", "image", "a", "foreignObject"} & names
    assert {path.parent for path in sweep.rglob("comparison/**/*")} == {sweep / "comparison"}
    assert {path.parent.parent for path in board.rglob("events*")} == {board}
    assert "'=1+1" in csv_text(load_comparison(sweep))  # no spreadsheet takes it for a formula
