"""A run's record is complete, and TensorBoard shows the same values."""

import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from support import TEXT, config, rows, series, summary
from tbevents import read_charts, read_events, read_hparams

TRAIN_METRICS = {
    "train/loss",
    "train/lr",
    "train/grad_norm",
    "perf/tokens_per_s",
    "perf/step_ms",
    "perf/peak_memory_training_mb",
}
VAL_METRICS = {"val/loss", "val/perplexity", "val/bits_per_byte"}
COSTS = {
    "cost/params",
    "cost/params_attention",
    "cost/params_embedding",
    "cost/flops_per_token",
    "cost/kv_bytes_per_token",
}


@pytest.fixture
def run(runs: Callable[[str], Path]) -> Path:
    return runs("gqa")


def test_a_run_folder_holds_its_record_and_nothing_else(run):
    names = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    event_files = {name for name in names if name.startswith("events.out.tfevents.")}
    assert len(event_files) == 2
    assert "events.out.tfevents.0.gptattn" in event_files  # a report replaces it
    assert names - event_files == {
        "config.yaml",
        "identity.json",
        "metrics.jsonl",
        "checkpoints/step=2.safetensors",
        "checkpoints/step=4.safetensors",
        "summary.json",
        ".lock",
    }
    # Beside it there is the cache alone.
    folder = run.parents[2]
    assert sorted(path.name for path in folder.iterdir()) == ["cache", "outputs", "text.txt"]
    assert all(re.match("[0-9a-f]{32}", path.name) for path in (folder / "cache").iterdir())


def test_the_config_is_plain_resolved_yaml(run):
    settings = config(run)
    assert "${" not in (run / "config.yaml").read_text(encoding="utf-8")
    assert (settings["model"]["num_layers"], settings["optim"]["lr"]) == (2, 2.0e-3)
    assert settings["choices"]["attn"] == run.parents[2].name


def test_the_rows_are_finite_and_in_order_and_hold_every_metric(run):
    steps = [row["step"] for row in rows(run)]
    assert steps == sorted(steps)
    for name in TRAIN_METRICS:
        assert [step for step, _ in series(run, name)][:4] == [1, 2, 3, 4]
    for name in VAL_METRICS | {"sample/text"}:
        assert [step for step, _ in series(run, name)] == [2, 4]
    for name in COSTS:
        assert [step for step, _ in series(run, name)] == [0]
    numbers = [v for row in rows(run) for v in row.values() if not isinstance(v, str)]
    assert all(type(v) in (int, float) and math.isfinite(v) for v in numbers)


def test_progress_counts_tokens_and_flops(run):
    per_token = summary(run)["metrics"]["cost/flops_per_token"]
    for step, tokens in series(run, "progress/tokens"):
        assert tokens == 4 * 16 * step
    assert series(run, "progress/flops")[-1] == (4, 4 * 4 * 16 * per_token)
    seconds = [value for _, value in series(run, "progress/seconds")]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0


def test_the_summary_is_complete(run):
    record = summary(run)
    assert record["status"] == "done"
    assert (record["variant"], record["seed"]) == (run.parents[2].name, 1)
    assert (record["experiment"], record["run"]) == (run.parent.name, run.name)
    assert (record["steps"], record["budget"]) == (4, "4 steps")
    assert record["metrics"].keys() >= TRAIN_METRICS | VAL_METRICS | COSTS
    data, held_out = record["data"], round(len(TEXT.encode()) / 10)
    assert (data["tokenizer"], data["vocab_size"]) == ("byte", 256)
    assert data["val_tokens"] == data["val_bytes"] == held_out
    assert data["train_tokens"] == len(TEXT.encode()) - held_out
    environment = record["environment"]
    assert (environment["threads"], environment["processes"]) == (1, 1)
    # PyPI's wheels are labelled without their build (+cu130).
    assert environment["libraries"]["torch"].split("+")[0] == torch.__version__.split("+")[0]


def test_the_summary_ends_with_the_last_rows(run):
    metrics = summary(run)["metrics"]
    for name in (VAL_METRICS | TRAIN_METRICS) - {"train/grad_norm", "perf/peak_memory_training_mb"}:
        assert metrics[name] == series(run, name)[-1][1]
    assert metrics["perf/tokens_per_s"] == pytest.approx(64 / (metrics["perf/step_ms"] / 1e3))


def test_perplexity_and_bits_per_byte_follow_from_the_loss(run):
    metrics = summary(run)["metrics"]
    assert metrics["val/perplexity"] == pytest.approx(2.718281828459045 ** metrics["val/loss"])
    # Each token is a byte here, and a nat is 1.4427 bits.
    assert metrics["val/bits_per_byte"] == pytest.approx(metrics["val/loss"] * 1.4426950408889634)


def test_tensorboard_has_each_value_of_the_record_in_the_same_order(run):
    shown = read_events(run)
    other = {"step", "time", "sample/text"} | COSTS  # each of which would be a chart of one point
    recorded = {name for row in rows(run) for name in row} - other
    assert set(shown.Tags()["scalars"]) == recorded >= TRAIN_METRICS | VAL_METRICS
    for tag in recorded:
        scalars = [(event.step, event.value) for event in shown.Scalars(tag)]
        assert scalars == [(step, np.float32(value)) for step, value in series(run, tag)]


def test_tensorboard_shows_charts_a_map_of_each_layer_and_the_samples(run):
    shown = read_events(run)
    (category,) = read_charts(shown)
    # The order counts: TensorBoard merges the layouts of all runs only if they are equal.
    names = ["val/loss", "perf/tokens_per_s", "train/lr", "train/loss"]
    assert [chart.title for chart in category.chart] == names
    assert [[*chart.multiline.tag] for chart in category.chart] == [[f"{name}$"] for name in names]
    tags = ["val_attention/layer_00", "val_attention/layer_01"]
    assert sorted(shown.Tags()["images"]) == tags
    for tag in tags:
        (image,) = shown.Images(tag)
        # Heads side by side, each 16 keys wide with 4 pixels per key, and 6 pixels between heads.
        assert (image.step, image.height, image.width) == (4, 16 * 4, 4 * (16 * 4 + 6) - 6)
    texts, recorded = shown.Tensors("sample/text/text_summary"), series(run, "sample/text")
    assert [event.step for event in texts] == [step for step, _ in recorded] == [2, 4]
    for event, (_, text) in zip(texts, recorded, strict=True):
        content = event.tensor_proto.string_val[0].decode()
        assert content == "\n".join("    " + line for line in text.splitlines())
        assert len(text) > 4  # the beginning of the held-out text, then 4 generated tokens


def test_every_run_has_the_same_row_of_settings_costs_and_losses(runs):
    found = {}
    for name in ("gqa", "mla"):
        kinds = ("experiment", "session_start_info", "session_end_info")
        columns, start, end = read_hparams(read_events(runs(name)), *kinds)
        types = {key: value.WhichOneof("kind") for key, value in start.hparams.items()}
        tags = [info.name.tag for info in columns.metric_infos]
        found[name] = types, tags
        names = {info.name for info in columns.hparam_infos}
        assert names == {"attn", "million params", "cache bytes per token", "lr", "seed"}
        costs = summary(runs(name))["metrics"]
        assert start.hparams["million params"].number_value == costs["cost/params"] / 1e6
        cache = start.hparams["cache bytes per token"].number_value
        assert cache == costs["cost/kv_bytes_per_token"]
        assert end.status == 1  # success
    assert found["gqa"] == found["mla"]
    types, tags = found["gqa"]
    assert (types["attn"], types["seed"]) == ("string_value", "number_value")
    assert {"val/loss", "perf/tokens_per_s"} < {*tags} < TRAIN_METRICS | VAL_METRICS
    assert len(tags) <= 5  # more would be hidden
