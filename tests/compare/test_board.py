"""TensorBoard shows a comparison as a run of its own, and its runs with the columns that vary."""

import json
import re
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
from reporting import LOSSES, report
from runfolders import write_speeds, write_sweep
from tbevents import read_charts, read_events, read_hparams, read_line

from gptattn.compare.board import describe_board
from gptattn.compare.table import load_comparison

SPEEDS = {"speed/tokens_per_s": 2048.0, "speed/decode_tokens_per_s": 500.0}


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep with measured speeds and its report in `comparison/`. Tests must not change it."""
    folder = tmp_path_factory.mktemp("sweep") / "runs"
    write_sweep(folder, LOSSES, config={"batch_size": 16})
    steps = {variant: [1.0, 1.0] for variant in LOSSES}  # of 16 rows of 128 tokens
    write_speeds(folder, "1", 2, **steps)
    report(folder)
    return folder


def test_each_variant_has_its_mean_and_band_in_one_chart(sweep):
    (category,) = read_charts(read_events(sweep / "comparison"))
    (chart,) = category.chart
    (series,) = chart.margin.series
    assert chart.title == "val/loss by variant (mean and band)"
    mean = np.mean(LOSSES["gqa"])
    # t(0.975, 4) = 2.776445 from the table.
    half = 2.776445 * np.std(LOSSES["gqa"], ddof=1) / np.sqrt(5)
    for variant in LOSSES:
        events = read_events(sweep / "comparison" / variant)
        assert {*events.Tags()["tensors"]} == {series.value, series.lower, series.upper}
    lines = [
        read_line(read_events(sweep / "comparison" / "gqa"), tag)
        for tag in (series.value, series.lower, series.upper)
    ]
    assert [step for step, _ in lines[0]] == [20, 40, 60, 80, 100]
    ends = [line[-1][1] for line in lines]
    assert ends == pytest.approx([mean, mean - half, mean + half], rel=1e-5)


def test_the_table_the_words_and_the_plots_are_there(sweep):
    events = read_events(sweep / "comparison")
    shown = {
        tag: events.Tensors(f"comparison/{tag}")[0].tensor_proto.string_val[0].decode()
        for tag in ("table", "words")
    }
    first, second, *_ = shown["table"].split("\n\n")
    assert first.startswith("| variant | n | val loss | vs mha | 95% interval | p | bits/byte |")
    assert "\n| gqa | 2,048 | 1.000 (1.000 to 1.000) |" in second
    assert "- gqa is worse than mha by 0.1200 nats" in shown["words"].splitlines()[0]
    assert {*events.Tags()["images"]} >= {
        f"comparison/{n}" for n in ("forest_loss", "pareto_cache")
    }
    (image,) = events.Images("comparison/pareto_params")
    drawn = (sweep / "comparison" / "pareto_params.png").read_bytes()
    assert image.encoded_image_string == drawn


def test_all_runs_have_the_columns_that_vary_and_the_speeds_measured(sweep):
    for variant in LOSSES:
        events = read_events(sweep / f"{variant}_s1")
        (columns,) = read_hparams(events, "experiment")
        names = {info.name for info in columns.hparam_infos}
        costs = {"million params", "cache bytes per token"}
        assert names == {"attn", "seed", *costs}  # not the lr, which is that of all
        assert [info.name.tag for info in columns.metric_infos] == ["val/loss", *SPEEDS]
        for tag, speed in SPEEDS.items():
            assert read_line(events, tag) == [(1000, speed)]


@pytest.mark.usefixtures("undrawn")
def test_a_later_report_replaces_the_board_and_nothing_else(tmp_path):
    sweep = write_sweep(tmp_path / "runs", {"mha": [2.0, 2.1], "gqa": [1.0, 1.1], "mqa": [2.0]})
    theirs = [
        sweep / "mha_s1" / "events.out.tfevents.1.host.1.0",
        sweep / "comparison" / "events.out.tfevents.1.host.1.0",
        sweep / "comparison" / "gqa" / "events.out.tfevents.1.host.1.0",
    ]
    for file in theirs:
        file.parent.mkdir(exist_ok=True, parents=True)
        file.write_bytes(b"")
    report(sweep)
    for variant in ("gqa", "mqa"):
        for run in sweep.glob(f"{variant}_s*"):
            (run / "summary.json").unlink()
    write_sweep(sweep, {"mla": [1.0]}, config={"name": "../.."})
    report(sweep)
    assert all(file.exists() for file in theirs)
    ours = [file.parent.name for file in sweep.rglob("*.gptattn")]
    assert sorted(ours) == sorted(
        [*("mha_s1", "mha_s2", "gqa_s1", "gqa_s2", "mqa_s1", "mla_s1"), "comparison", "mha", "_"]
    )
    # TensorBoard takes the columns of any one run.
    declared = [
        read_hparams(read_events(run.parent), "experiment")[0].hparam_infos
        for run in sweep.glob("*_s*/*.gptattn")
    ]
    assert all({*map(str, one)} == {*map(str, declared[0])} for one in declared)


def test_the_band_of_two_seeds_is_these_seeds(tmp_path, capsys):
    sweep = write_sweep(tmp_path / "runs", {"mha": [2.0, 2.2]})
    report(sweep, f"out={tmp_path / 'out'}")
    shown = capsys.readouterr().out
    assert f"tensorboard --logdir {tmp_path / 'out'}\nhttp://localhost" in shown
    assert "defaultExperimentId/.%22" in shown  # its own run, the folder's
    events = read_events(tmp_path / "out" / "mha")
    ends = {tag: read_line(events, tag)[-1][1] for tag in events.Tags()["tensors"]}
    base = "by_variant/val_loss"
    assert ends == pytest.approx({base: 2.1, f"{base}_low": 2.0, f"{base}_high": 2.2})


def test_the_address_pins_cards_that_exist_and_colours_runs_by_variant(sweep):
    _, address = describe_board(sweep / "comparison", load_comparison(sweep)).splitlines()
    query = parse_qs(urlsplit(address).query, strict_parsing=True)
    cards = json.loads(query["pinnedCards"][0])
    images = read_events(sweep / "comparison").Tags()["images"]
    assert {card["tag"] for card in cards if "runId" in card} <= {*images}
    assert [card["tag"] for card in cards if "runId" not in card] == [
        *("val/loss", "perf/tokens_per_s")
    ]
    kind, _, pattern = query["runColorGroup"][0].partition(":")
    assert kind == "regex"
    names = ("gqa_s1_0a1b2c", "comparison/gqa", "kv/gqa_s12_ffffff", "gqa_s1+lr-1_0a1b2c", "mha")
    found = [re.search(pattern, name).groups() for name in names]
    assert found == [*[("gqa", None)] * 3, ("gqa", "+lr-1"), ("mha", None)]
