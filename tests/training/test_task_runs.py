"""A synthetic task as the data of a run: trained, validated, recorded, resumed and refused."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from building import settings
from interrupted import crash, fingerprint, once
from support import Call, check_job, command, config, rows, series, summary, tiny, train
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gptattn.data.tasks import VALIDATION, Recall, TaskData, task_rows
from gptattn.data.tokenizer import TaskIds
from gptattn.errors import ConfigError
from gptattn.runs.load import load_run
from gptattn.settings.build import build_model

RECALL = ("data=recall", "data.vocab_size=40", "data.pairs=3", "data.val_rows=10")
TASKS = {
    "recall": RECALL,
    "copy": ("data=copy", "data.vocab_size=9", "data.val_rows=10"),
    "induction": ("data=induction", "data.vocab_size=9", "data.val_rows=10"),
    "selective_copy": ("data=selective_copy", "data.tokens=3", "data.val_rows=10"),
}
MASKED = -100  # torch's own mark


def own(task: str, *overrides: str) -> tuple[str, ...]:
    return (*TASKS[task], "sample.tokens=0", *overrides)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("run"), *own("recall"))


@pytest.mark.parametrize("task", TASKS)
def test_a_run_on_each_task_is_recorded_with_its_accuracy(
    task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(tmp_path, *own(task))
    out = capsys.readouterr().out
    assert "accuracy 0." in out
    assert "bits" not in out
    metrics = summary(run)["metrics"]
    assert 0 <= metrics["val/accuracy"] <= 1
    assert "val/bits_per_byte" not in metrics
    assert [step for step, _ in series(run, "val/accuracy")] == [2, 4]
    assert summary(run)["data"]["val_rows"] == 10
    assert config(run)["tokenizer"]["vocab_size"] == summary(run)["data"]["vocab_size"]


def test_loss_and_accuracy_are_those_of_torch_over_the_scored_positions(run: Path) -> None:
    saved = load_run(run)
    ids, targets = task_rows(Recall(40, 10, 3), VALIDATION, 0, 10, 16)
    with torch.no_grad():
        logits = saved.model(torch.from_numpy(ids)).flatten(0, 1)
    wanted = torch.from_numpy(targets).flatten()
    wanted = wanted.masked_fill(wanted < 0, MASKED)
    expected = torch.nn.functional.cross_entropy(logits, wanted, ignore_index=MASKED)
    metrics = summary(run)["metrics"]
    assert metrics["val/loss"] == pytest.approx(expected.item(), rel=1e-5)
    right = (logits.argmax(-1) == wanted).sum().item()
    assert metrics["val/accuracy"] == right / 30
    assert summary(run)["data"]["val_tokens"] == 30


def test_the_first_training_loss_is_that_of_the_first_batch(run: Path) -> None:
    cfg = settings(*tiny(run.parent, *own("recall")))
    torch.manual_seed(1)
    model = build_model(cfg, 40)
    ids, targets = (torch.from_numpy(part) for part in task_rows(Recall(40, 10, 3), 1, 0, 4, 16))
    wanted = targets.masked_fill(targets < 0, MASKED).flatten()
    expected = torch.nn.functional.cross_entropy(
        model(ids).flatten(0, 1), wanted, ignore_index=MASKED
    )
    assert series(run, "train/loss")[0][1] == pytest.approx(expected.item(), rel=1e-5)


def test_the_rows_of_the_validation_are_the_same_for_every_seed_and_reached_by_none() -> None:
    data = TaskData(Recall(40, 10, 3), 16, TaskIds())
    again = [
        np.concatenate([ids.numpy() for ids, _ in data.validation(size, 16)]) for size in (1, 3, 99)
    ]
    assert all(np.array_equal(rows, data.val[0]) for rows in again)
    assert len(data.validation(3, 16)) == 4
    largest = settings("seed=4294967295").seed
    assert largest < VALIDATION
    assert data.text_hash == TaskData(Recall(40, 10, 3), 16, TaskIds()).text_hash
    for other in (Recall(40, 10, 3, power=1.0), Recall(40, 11, 3), Recall(41, 10, 3)):
        assert TaskData(other, 16, TaskIds()).text_hash != data.text_hash


def test_a_run_on_a_task_goes_on_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped, whole = tmp_path / "stopped", train(tmp_path / "whole", *own("recall"))
    where = [f"hydra.run.dir={stopped / 'run'}"]
    once(monkeypatch, "training_step", 3, crash)
    assert command(stopped, *tiny(stopped, *own("recall"), *where)) == 1
    assert command(stopped, "resume=run") == 0
    assert fingerprint(stopped / "run") == fingerprint(whole)


def test_tensorboard_has_the_accuracy_as_a_curve_and_a_column(run: Path) -> None:
    events = EventAccumulator(str(run))
    events.Reload()
    assert [event.step for event in events.Scalars("val/accuracy")] == [2, 4]
    layout = str(events.Tensors("custom_scalars__config__")[0].tensor_proto)
    assert "val/accuracy$" in layout
    assert "val_attention/entropy/layer_00" in rows(run)[-2] | rows(run)[-1]


REFUSED = [
    (("recall", "tokenizer=byte"), "tokenizer: data=recall has its own ids"),
    (("recall", "tokenizer.vocab_size=9"), "tokenizer.vocab_size: 9 is not the task's 40"),
    (("recall", "sample.tokens=5"), "sample.tokens: data=recall has no text"),
    (("recall", "model.context_length=8"), "data.pairs: 3 pairs do not fit into 8 ids"),
    (("recall", "model.vocab_size=30"), "model.vocab_size: 30 is below the 40 ids of the data"),
    (("recall", "data.pairs=0"), "data.pairs: pairs=0 is not a positive number"),
    (("recall", "data.path=x"), "data.path: "),
    (("selective_copy", "data.tokens=9"), "data.tokens: 9 ids do not fit into 16 twice"),
]


@pytest.mark.parametrize(("ask", "said"), REFUSED, ids=lambda x: x[1] if type(x) is tuple else "")
def test_what_has_no_meaning_on_a_task_is_refused(
    ask: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    task, *overrides = ask
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}"):
        check_job(tiny(tmp_path, *own(task), *overrides))


@pytest.mark.parametrize("script", ["generate", "attention_map"])
def test_scripts_that_need_a_text_refuse_a_run_on_a_task(
    script: str, run: Path, call: Call
) -> None:
    code, _, err = call(script, f"run={run}", "prompt=Once")
    assert (code, err.count("\n")) == (3, 1)
    assert "trained on a synthetic task, which has no text" in err


def test_its_weights_can_be_converted_and_trained_on(
    run: Path, tmp_path: Path, call: Callable[..., tuple[int, str, str]]
) -> None:
    gqa = train(tmp_path / "gqa", *own("recall"), "attn=gqa", f"init_from={run}", "budget.steps=1")
    assert summary(gqa)["variant"] == "gqa"
    code, _, err = call("convert", f"from={run}", "to=gqa", f"out={tmp_path / 'out'}")
    assert code == 0, err
    assert load_run(tmp_path / "out").tokenizer.vocab_size == 40
