"""Runs with data.mask_documents=true: their figures, their names, and what is refused."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from building import settings
from support import check_job, is_complaint, refuses, rows, series, summary, tiny, train
from torch import Tensor

from gptattn.build.data import build_data
from gptattn.build.model import build_model
from gptattn.data.tokens import TokenData
from gptattn.runs.load import SavedRun, load_run

T = 16  # the context of a tiny run


def books(folder: Path, *overrides: str) -> tuple[str, ...]:
    """Overrides of a run on documents that are shorter than a row."""
    below = folder / "books"
    below.mkdir(parents=True, exist_ok=True)
    for n in range(30):
        (below / f"{n:02d}.txt").write_text("".join(chr(97 + n % 26) + str(i) for i in range(n)))
    masked = "data.mask_documents=true"
    # A fifth is held out, so that the validation has several windows.
    return ("data=text", f"data.path={below}", "validation.fraction=0.2", masked, *overrides)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("masked")
    return train(folder, *books(folder, "sample.tokens=0"))


def held_out(run: Path) -> tuple[SavedRun, TokenData]:
    saved = load_run(run)
    return saved, build_data(saved.cfg, saved.tokenizer)


def find_documents(numbers: Tensor) -> list[slice]:
    """Where each document of a row begins and ends."""
    lengths = numbers.unique_consecutive(return_counts=True)[1]
    ends = lengths.cumsum(0)
    return [*map(slice, (ends - lengths).tolist(), ends.tolist())]


@torch.no_grad()
def test_the_loss_is_that_of_documents_in_rows_of_their_own(run):
    saved, data = held_out(run)
    nats, count = 0.0, 0
    for batch in data.validation(4, T):
        for ids, targets, numbers in zip(*batch, strict=True):
            for part in find_documents(numbers):
                logits = saved.model(ids[part][None])[0]
                nats += F.cross_entropy(logits, targets[part], reduction="sum").item()
                count += part.stop - part.start
    assert count == len(data.val) - 1
    assert summary(run)["metrics"]["val/loss"] == pytest.approx(nats / count, rel=1e-5)
    bits = nats / math.log(2) / summary(run)["data"]["val_bytes"]
    assert series(run, "val/bits_per_byte")[-1][1] == pytest.approx(bits, rel=1e-5)


@torch.no_grad()
def test_figures_of_attention_are_those_of_each_document(run):
    saved, data = held_out(run)
    ids, numbers = data.opening(T, 512)
    assert numbers.max() > 3
    found: dict[str, list[Tensor]] = {"entropy": [], "sink": []}
    for row, own in zip(ids, numbers, strict=True):
        for part in find_documents(own):
            (w_1HTT,) = saved.model.attention_weights(row[part][None])
            w_HTT = w_1HTT[0, :, 1:].double()
            found["entropy"].append(torch.special.entr(w_HTT).sum(-1))
            found["sink"].append(w_HTT[..., 0])
    newest = [row for row in rows(run) if "val_attention/sink/layer_00" in row][-1]
    for name, each in found.items():
        mean = torch.cat(each, dim=1).mean().item()
        assert newest[f"val_attention/{name}/layer_00"] == pytest.approx(mean, rel=1e-4)


def test_loss_by_position_keeps_documents_apart_and_caches_are_refused(run, call):
    assert call("evaluate", f"run={run}", f"lengths=[{T}]")[0] == 0
    found = json.loads((run / "evaluation.json").read_text())["lengths"][str(T)]
    saved, data = held_out(run)
    full = [batch for batch in data.validation(4, T) if batch[0].shape[1] == T]
    nats = sum(saved.model.loss(*batch).item() * batch[0].numel() for batch in full)
    assert found["loss"] == pytest.approx(nats / (T * found["windows"]), rel=1e-5)
    code, _, err = call("evaluate", f"run={run}", "cache=[full,int8]")
    assert (code, is_complaint(err, "cache: lengths")) == (2, True)


@pytest.mark.parametrize(
    ("override", "said"),
    [("data.path={text}", "two or more documents"), ("data.mask_documents=3", "true or false")],
)
def test_what_cannot_be_kept_apart_is_refused_in_one_line(override, said, tmp_path):
    given = tiny(tmp_path, *books(tmp_path, override.format(text=tmp_path / "text.txt")))
    with refuses(f"data.mask_documents: {said}"):
        check_job(given)


def test_a_layer_that_does_not_keep_documents_apart_is_refused(tmp_path):
    cfg = settings(*tiny(tmp_path, *books(tmp_path)))
    mixer = {"attn": {"_target_": "broken_layers.Mixer"}, "allow_targets": ["broken_layers"]}
    with refuses("data.mask_documents: Mixer in layer 0"):
        build_model(replace(cfg, **mixer), 256)
