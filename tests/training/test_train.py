"""A run leaves a whole record, repeats itself, and stops when its budget is used up."""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
import yaml
from support import TEXT, command, rows, run_folders, series, summary, tiny, train
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from torch.nn.functional import cross_entropy

import gptattn.data.sampler
import gptattn.training.callbacks
from gptattn.cli.compose import CONF
from gptattn.cli.main import check_job
from gptattn.data.sampler import ValidationSet
from gptattn.model.gpt import GPT
from gptattn.runs.checkpoint import read_checkpoint
from gptattn.runs.folder import RunFolder
from gptattn.settings.build import build_data, build_model
from gptattn.training.checkpoint_callback import AtomicCheckpointIO
from gptattn.training.datamodule import TokenDataModule
from gptattn.training.module import LanguageModel

VARIANTS = sorted(file.stem for file in (CONF / "attn").glob("*.yaml"))

TRAIN_METRICS = {
    "train/loss",
    "train/lr",
    "train/grad_norm",
    "perf/tokens_per_s",
    "perf/step_ms",
    "perf/mfu",
    "perf/peak_memory_mb",
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


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One tiny run of two layers of every variant."""
    base = tmp_path_factory.mktemp("variants")
    return {v: train(base / v, f"attn={v}", "model.num_layers=2") for v in VARIANTS}


@pytest.fixture(params=VARIANTS)
def run(request: pytest.FixtureRequest, runs: dict[str, Path]) -> Path:
    return runs[request.param]


def losses(run: Path) -> list[tuple[int, Any]]:
    return series(run, "train/loss") + series(run, "val/loss")


def config(run: Path) -> dict[str, Any]:
    return yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))


def events(run: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(run), size_guidance={"scalars": 0, "images": 0})
    return accumulator.Reload()


# The record


def test_a_run_folder_holds_its_record_and_nothing_else(run: Path) -> None:
    names = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    event_files = {name for name in names if name.startswith("events.out.tfevents.")}
    assert len(event_files) == 1
    assert names - event_files == {
        ".hydra/config.yaml",
        ".hydra/hydra.yaml",
        ".hydra/overrides.yaml",
        "config.yaml",
        "identity.json",
        "metrics.jsonl",
        "checkpoints/step=2.ckpt",
        "checkpoints/step=2.ckpt.sha256",
        "checkpoints/step=4.ckpt",
        "checkpoints/step=4.ckpt.sha256",
        "summary.json",
        ".lock",
    }


def test_a_run_leaves_nothing_outside_of_its_folder_and_the_cache(run: Path) -> None:
    folder = run.parents[2]
    assert sorted(path.name for path in folder.iterdir()) == ["cache", "outputs", "text.txt"]
    assert [path.suffix for path in (folder / "cache").iterdir()] == [".tokens"]


def test_the_config_is_plain_resolved_yaml(run: Path) -> None:
    text = (run / "config.yaml").read_text(encoding="utf-8")
    settings = config(run)
    assert "${" not in text
    assert "!!" not in text
    assert settings["model"]["num_layers"] == 2
    assert settings["optim"]["lr"] == 2.0e-3
    assert settings["optim"]["eps"] == 1.0e-8
    assert settings["choices"]["attn"] == run.parents[2].name
    assert settings["choices"]["position"] == "learned"


def test_the_config_of_a_run_trains_the_same_run_again(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    overrides = (runs["gqa"] / ".hydra" / "overrides.yaml").read_text(encoding="utf-8")
    assert command(tmp_path, *yaml.safe_load(overrides)) == 0
    (again,) = run_folders(tmp_path)
    assert config(again) == config(runs["gqa"])
    assert losses(again) == losses(runs["gqa"])


def test_the_rows_are_finite_and_in_order_and_hold_every_metric(run: Path) -> None:
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


def test_progress_counts_tokens_and_flops(run: Path) -> None:
    per_token = summary(run)["metrics"]["cost/flops_per_token"]
    tokens = [4 * 16 * step for step in (1, 2, 3, 4)]
    assert sorted({value for _, value in series(run, "progress/tokens")}) == tokens
    assert sorted({value for _, value in series(run, "progress/flops")}) == [
        count * per_token for count in tokens
    ]
    seconds = [value for _, value in series(run, "progress/seconds")]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0


def test_the_summary_is_complete(run: Path) -> None:
    record = summary(run)
    assert set(record) == {
        "status",
        "variant",
        "seed",
        "experiment",
        "run",
        "steps",
        "budget",
        "completed",
        "init_from",
        "match",
        "metrics",
        "hyperparameters",
        "data",
        "environment",
    }
    assert record["status"] == "done"
    assert (record["variant"], record["seed"]) == (run.parents[2].name, 1)
    assert (record["experiment"], record["run"]) == (run.parent.name, run.name)
    assert (record["steps"], record["budget"]) == (4, "4 steps")
    assert record["metrics"].keys() >= TRAIN_METRICS | VAL_METRICS | COSTS
    data = record["data"]
    count = len(TEXT.encode())
    assert (data["tokenizer"], data["vocab_size"]) == ("byte", 256)
    assert data["val_tokens"] == data["val_bytes"] == round(count / 10)
    assert data["train_tokens"] == count - round(count / 10)
    environment = record["environment"]
    assert environment["threads"] == 1
    assert environment["libraries"]["torch"] == torch.__version__
    assert set(environment) == {
        "gptattn",
        "git_commit",
        "python",
        "platform",
        "device",
        "threads",
        "libraries",
    }


def test_the_summary_ends_with_the_last_rows(run: Path) -> None:
    metrics = summary(run)["metrics"]
    for name in ("train/loss", "train/lr", "val/loss", "val/perplexity", "val/bits_per_byte"):
        assert metrics[name] == series(run, name)[-1][1]
    for name in ("perf/tokens_per_s", "perf/step_ms", "perf/mfu"):
        assert metrics[name] == series(run, name)[-1][1]
    assert metrics["perf/tokens_per_s"] == pytest.approx(64 / (metrics["perf/step_ms"] / 1e3))


def test_perplexity_and_bits_per_byte_follow_from_the_loss(run: Path) -> None:
    for row in rows(run):
        if "val/loss" in row:
            assert row["val/perplexity"] == pytest.approx(2.718281828459045 ** row["val/loss"])
            # A byte is a token here, and a nat is 1.4427 bits.
            bits = row["val/loss"] * 1.4426950408889634
            assert row["val/bits_per_byte"] == pytest.approx(bits)


def test_bits_per_byte_counts_bytes_where_tokens_are_characters(tmp_path: Path) -> None:
    run = train(tmp_path, "tokenizer=char", "budget.steps=1", "validation.fraction=0.5")
    tail = TEXT[len(TEXT) - round(len(TEXT) / 2) :]
    assert len(tail.encode()) > len(tail)
    metrics = summary(run)["metrics"]
    nats = metrics["val/loss"] * len(tail)
    assert metrics["val/bits_per_byte"] == pytest.approx(nats / math.log(2) / len(tail.encode()))


# TensorBoard


def test_tensorboard_shows_the_scalars_of_the_record(run: Path) -> None:
    shown = events(run)
    # Declared at step 0 or told at a step: the record has each, in the same order.
    for tag in TRAIN_METRICS | VAL_METRICS | COSTS:
        scalars = [(event.step, event.value) for event in shown.Scalars(tag)]
        expected = [(step, np.float32(value)) for step, value in series(run, tag)]
        assert scalars == expected
    recorded = {name for row in rows(run) for name in row} - {"step", "time", "sample/text"}
    assert set(shown.Tags()["scalars"]) == recorded


def test_tensorboards_layout_is_the_losses_and_the_speed(run: Path) -> None:
    shown = events(run)
    (event,) = shown.Tensors("custom_scalars__config__")
    (category,) = Layout.FromString(event.tensor_proto.string_val[0]).category
    found = {
        chart.title: [
            tag
            for tag in shown.Tags()["scalars"]
            if any(re.match(wanted, tag) for wanted in chart.multiline.tag)
        ]
        for chart in category.chart
    }
    # In this order; TensorBoard merges the layouts of all runs where they are equal.
    assert list(found) == ["val/loss", "train/loss", "perf/tokens_per_s"]
    assert all(tags == [title] for title, tags in found.items())


def test_no_curve_of_attention_comes_before_the_losses(run: Path) -> None:
    tags = sorted(events(run).Tags()["scalars"])
    layers = [f"val_attention/{name}/layer_0{i}" for name in ("entropy", "sink") for i in (0, 1)]
    assert tags[-4:] == layers
    assert not [tag for tag in tags[:-4] if "attention/" in tag]


def test_tensorboard_shows_an_attention_map_per_layer(run: Path) -> None:
    shown = events(run)
    tags = ["val_attention/layer_00", "val_attention/layer_01"]
    assert sorted(shown.Tags()["images"]) == tags
    for tag in tags:
        (image,) = shown.Images(tag)
        assert image.step == 4
        assert image.height == 16 * 4
        # Heads side by side, each 16 keys of 4 pixels, 6 pixels between two.
        assert (image.width + 6) % (16 * 4 + 6) == 0


def test_tensorboard_shows_the_samples_of_the_record(run: Path) -> None:
    shown = events(run).Tensors("sample/text/text_summary")
    recorded = series(run, "sample/text")
    assert [event.step for event in shown] == [step for step, _ in recorded] == [2, 4]
    for event, (_, text) in zip(shown, recorded, strict=True):
        content = event.tensor_proto.string_val[0].decode()
        assert content == "\n".join("    " + line for line in text.splitlines())
        assert text  # the first words of the held-out text, and 4 tokens more


def hparams(run: Path) -> tuple[dict[str, type], set[str], int]:
    """Each hyperparameter's type, the metric tags, and the status of the session."""
    metadata = events(run).summary_metadata
    found = {}
    for tag in metadata:
        if tag.startswith("_hparams_/"):
            data = HParamsPluginData.FromString(metadata[tag].plugin_data.content)
            found[tag] = getattr(data, data.WhichOneof("data"))
    start = found["_hparams_/session_start_info"].hparams
    types = {key: value.WhichOneof("kind") for key, value in start.items()}
    tags = {info.name.tag for info in found["_hparams_/experiment"].metric_infos}
    return types, tags, found["_hparams_/session_end_info"].status


def test_every_run_has_the_same_hyperparameters_and_metrics(runs: dict[str, Path]) -> None:
    types, tags, status = hparams(runs["gqa"])
    assert types["attn"] == "string_value"
    assert types["seed"] == "number_value"
    assert {"val/loss", "perf/tokens_per_s", "cost/params"} <= tags
    assert tags <= TRAIN_METRICS | VAL_METRICS | COSTS
    assert "hp_metric" not in tags
    assert status == 1  # success
    for run in runs.values():
        assert hparams(run) == (types, tags, status)
        assert list(summary(run)["hyperparameters"]) == list(
            summary(runs["gqa"])["hyperparameters"]
        )


# Fairness


def test_a_seed_repeats_a_run_and_another_does_not(runs: dict[str, Path], tmp_path: Path) -> None:
    same = train(tmp_path / "same", "attn=gqa", "model.num_layers=2")
    other = train(tmp_path / "other", "attn=gqa", "model.num_layers=2", "seed=0")
    assert losses(same) == losses(runs["gqa"])
    assert series(same, "sample/text") == series(runs["gqa"], "sample/text")
    first = [value for _, value in losses(other)], [value for _, value in losses(runs["gqa"])]
    assert all(a != b for a, b in zip(*first, strict=True))


def test_what_is_measured_or_kept_does_not_change_the_losses(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    quiet = ("checkpoint=false", "sample.tokens=0", "validation.count=1")
    run = train(tmp_path, "attn=gqa", "model.num_layers=2", *quiet)
    assert series(run, "train/loss") == series(runs["gqa"], "train/loss")
    assert series(run, "val/loss") == series(runs["gqa"], "val/loss")[-1:]
    assert not (run / "checkpoints").exists()
    assert series(run, "sample/text") == []


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Every batch that the model is trained on."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    training_step = LanguageModel.training_step

    def spied(self: LanguageModel, batch: Any, batch_idx: int) -> None:
        seen.append(batch)
        training_step(self, batch, batch_idx)

    monkeypatch.setattr(LanguageModel, "training_step", spied)
    return seen


def test_all_variants_see_the_same_batches(
    batches: list[tuple[torch.Tensor, torch.Tensor]], tmp_path: Path
) -> None:
    streams = []
    for variant in ("mha_wrapper", "mqa"):
        train(tmp_path / variant, f"attn={variant}")
        streams.append([torch.stack(batch).tolist() for batch in batches])
        batches.clear()
    assert len(streams[0]) == 4
    assert streams[0] == streams[1]


@pytest.mark.parametrize("accumulate", [2, 4])
def test_accumulation_changes_no_loss(
    accumulate: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = train(tmp_path / "whole")
    seen = []
    loss = GPT.loss

    def spied(self: GPT, ids: torch.Tensor, *args: Any) -> torch.Tensor:
        seen.append(len(ids))
        return loss(self, ids, *args)

    monkeypatch.setattr(GPT, "loss", spied)
    split = train(tmp_path / "split", f"accumulate={accumulate}")
    # The windows of a step are dealt to micro-batches in order; validation has such rows too.
    assert seen[: 4 * accumulate - 1] == [4 // accumulate] * (4 * accumulate - 1)
    assert [step for step, _ in losses(split)] == [step for step, _ in losses(whole)]
    for (_, a), (_, b) in zip(losses(whole), losses(split), strict=True):
        assert a == pytest.approx(b, abs=1e-5)
    for (_, a), (_, b) in zip(
        series(whole, "train/grad_norm"), series(split, "train/grad_norm"), strict=True
    ):
        assert a == pytest.approx(b, abs=1e-5)


def test_a_row_holds_the_mean_loss_of_its_steps(tmp_path: Path) -> None:
    every = train(tmp_path / "every", "budget.steps=6", "validation.count=1")
    some = train(tmp_path / "some", "budget.steps=6", "validation.count=1", "log_every=3")
    single = [value for _, value in series(every, "train/loss")]
    assert [step for step, _ in series(some, "train/loss")] == [1, 3, 6]
    means = [single[0], np.mean(single[1:3]), np.mean(single[3:])]
    assert [value for _, value in series(some, "train/loss")] == pytest.approx(means, abs=1e-6)


# The budget


@pytest.mark.parametrize(
    ("budget", "steps"),
    [
        ("budget.steps=1", 1),
        ("budget.steps=3", 3),
        ("budget.steps=null budget.tokens=65", 2),
        ("budget.steps=null budget.tokens=128", 2),
        ("budget.steps=null budget.default_steps=2", 2),
        ("budget.steps=3 accumulate=2", 3),
        ("budget.steps=7 validation.count=5", 7),
    ],
)
def test_a_run_takes_the_steps_of_its_budget_and_validates_at_its_end(
    budget: str, steps: int, tmp_path: Path
) -> None:
    run = train(tmp_path, *budget.split(" "))
    assert summary(run)["steps"] == steps
    assert series(run, "train/loss")[-1][0] == steps
    validated = [step for step, _ in series(run, "val/loss")]
    assert validated[-1] == steps
    assert len(validated) == len(set(validated))
    assert len(validated) <= config(run)["validation"]["count"]
    assert RunFolder(run).known_checkpoints()[0].name == f"step={steps}.ckpt"


@pytest.fixture
def fake_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock on which every training step takes a second, and making its batch none."""

    def ticks() -> Iterator[float]:
        now = 0.0
        while True:
            yield now
            now += 1.0

    ticking = ticks()
    clock = SimpleNamespace(perf_counter=lambda: next(ticking))
    monkeypatch.setattr(gptattn.training.callbacks, "time", clock)
    monkeypatch.setattr(gptattn.data.sampler, "time", SimpleNamespace(perf_counter=lambda: 0.0))


@pytest.mark.parametrize(("seconds", "steps"), [(0.5, 1), (3.0, 3), (3.5, 4)])
def test_a_budget_of_seconds_counts_training_time_alone(
    seconds: float, steps: int, tmp_path: Path, fake_clock: None
) -> None:
    run = train(tmp_path, "budget.steps=null", f"budget.seconds={seconds}")
    assert summary(run)["steps"] == steps
    assert summary(run)["budget"] == f"{seconds:g} seconds"
    assert series(run, "val/loss")[-1][0] == steps
    assert [value for _, value in series(run, "perf/step_ms")] == [1000.0] * (steps + 1)
    assert series(run, "perf/tokens_per_s")[-1][1] == 64.0
    assert RunFolder(run).known_checkpoints()[0].name == f"step={steps}.ckpt"


def test_the_learning_rate_follows_the_budget_of_steps(tmp_path: Path) -> None:
    run = train(tmp_path, "budget.steps=4", "optim.lr=0.1", "optim.warmup_fraction=0.5")
    # Progress when a step is taken is 1/4, 2/4, 3/4, 4/4: half way up, the top, half way down to
    # a tenth, and a tenth.
    expected = [(1, 0.05), (2, 0.1), (3, 0.055), (4, 0.01)]
    for (step, value), (expected_step, expected_value) in zip(
        series(run, "train/lr"), expected, strict=True
    ):
        assert step == expected_step
        assert value == pytest.approx(expected_value)


# Sweeps


def test_a_sweep_makes_a_folder_per_run_with_a_readable_name(tmp_path: Path) -> None:
    arguments = tiny(tmp_path, "budget.steps=2", "checkpoint=false", "experiment_name=four")
    sweep = ["attn=mha,gqa", "seed=1,2"]
    assert command(tmp_path, "-m", *arguments, *sweep) == 0
    runs = run_folders(tmp_path)
    assert len(runs) == 4
    assert {run.parent for run in runs} == {tmp_path / "outputs" / "four"}
    for run in runs:
        record = summary(run)
        # What all runs of a sweep share tells none from another.
        assert re.fullmatch(rf"{record['variant']}_s{record['seed']}_[0-9a-f]{{6}}", run.name)
        assert record["run"] == run.name
        assert config(run)["seed"] == record["seed"]
        assert len(list(run.glob("events.out.*"))) == 1
    assert {(summary(run)["variant"], summary(run)["seed"]) for run in runs} == {
        (variant, seed) for variant in ("mha", "gqa") for seed in (1, 2)
    }
    files = {path.name for path in (tmp_path / "outputs" / "four").iterdir() if path.is_file()}
    assert files == {"multirun.yaml", "ledger.jsonl", ".sweep.lock"}


def test_a_run_in_a_sweep_is_the_run_alone(runs: dict[str, Path], tmp_path: Path) -> None:
    arguments = tiny(tmp_path, "model.num_layers=2", "attn=mha,gqa", "-m")
    assert command(tmp_path, *arguments) == 0
    for run in run_folders(tmp_path):
        alone = runs[summary(run)["variant"]]
        assert losses(run) == losses(alone)
        assert summary(run)["metrics"]["cost/params"] == summary(alone)["metrics"]["cost/params"]


# Checkpoints


def rebuilt(run: Path) -> tuple[GPT, np.ndarray]:
    """A fresh model with the run's weights, and the run's validation tokens."""
    overrides = yaml.safe_load((run / ".hydra" / "overrides.yaml").read_text(encoding="utf-8"))
    cfg = check_job(overrides)
    data = build_data(cfg)
    torch.manual_seed(999)
    model = build_model(cfg, data.tokenizer.vocab_size)
    file = RunFolder(run).known_checkpoints()[0]
    weights = read_checkpoint(file)["state_dict"]
    model.load_state_dict({name.removeprefix("model."): w for name, w in weights.items()})
    return model.eval(), data.val[:]


def test_a_checkpoint_gives_a_fresh_model_the_same_validation_loss(run: Path) -> None:
    model, val = rebuilt(run)
    nats, count = 0.0, 0
    with torch.no_grad():
        for ids, targets in ValidationSet(val, batch_size=3, context_length=16):
            logits = model(ids).double()
            nats += cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").item()
            count += targets.numel()
    assert count == len(val) - 1
    assert nats / count == pytest.approx(summary(run)["metrics"]["val/loss"], abs=1e-5)


def test_a_checkpoint_holds_plain_values(run: Path) -> None:
    file = RunFolder(run).known_checkpoints()[0]
    checkpoint = read_checkpoint(file)
    assert checkpoint["global_step"] == 4
    assert len(checkpoint["optimizer_states"]) == 1


def fit(
    folder: Path, steps: int, accumulate: int, resume: Path | None = None
) -> tuple[list[float], L.Trainer]:
    """Train to `steps` of 6 steps; the losses of this stretch, and the trainer."""
    cfg = check_job(tiny(folder, f"accumulate={accumulate}", "attn=gqa"))
    data = build_data(cfg)
    torch.manual_seed(1 if resume is None else 2)
    module = LanguageModel(
        build_model(cfg, 256),
        cfg.optim,
        lambda step: step / 6,
        accumulate=accumulate,
        loss_chunk_tokens=512,
        val_bytes=100,
    )
    datamodule = TokenDataModule(data, seed=1, batch_size=4, val_batch_size=2, context_length=16)
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=steps,
        max_epochs=-1,
        val_check_interval=2,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        plugins=[AtomicCheckpointIO()],
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=datamodule, ckpt_path=resume)
    return [loss.item() for loss in module.train_losses], trainer


# Lightning itself uses what torch is about to drop; a run keeps its warnings out of sight.
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec:FutureWarning")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("stop", [2, 3])
def test_a_resumed_run_goes_on_with_the_losses_of_one_that_never_stopped(
    stop: int, accumulate: int, tmp_path: Path
) -> None:
    whole, _ = fit(tmp_path, 6, accumulate)
    begun, trainer = fit(tmp_path, stop, accumulate)
    trainer.save_checkpoint(tmp_path / "stopped.ckpt")
    rest, _ = fit(tmp_path, 6, accumulate, resume=tmp_path / "stopped.ckpt")
    assert len(whole) == 6
    assert begun == whole[:stop]
    assert rest == whole  # those since the last row are part of the state
