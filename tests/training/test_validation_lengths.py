"""The accuracy of a task's rows of other lengths than the trained one, and of slices."""

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from building import settings
from support import check_job, refuses, rows, series, summary, tiny, train

from gptattn.build.longer import build_longer
from gptattn.data.sampler import make_generator
from gptattn.data.tasks import IGNORED, VALIDATION, Copy, Rows
from gptattn.runs.load import load_run
from gptattn.runs.metrics import lowest_accuracy
from gptattn.settings.identity import settings_key
from gptattn.settings.record import complete_record


@dataclass(frozen=True)
class Halves(Copy):
    """Copying, where the label of a position is the half of the row's answer that it is in."""

    def slices(self) -> tuple[str, ...]:
        return "half_1", "half_2", "half_3"  # of which the last does not exist

    def draw(self, generator: np.random.Generator, rows: int, length: int) -> Rows:
        ids, targets = super().draw(generator, rows, length)
        late = np.arange(length) >= length // 2 + length // 4
        return ids, targets, np.broadcast_to(late, ids.shape).astype(np.int64)


TASK = (
    *("data=copy", f"data._target_={__name__}.Halves", f"allow_targets=[{__name__}]"),
    *("data.vocab_size=5", "data.val_rows=9", "sample.tokens=0", "model.dropout=0.1"),
)
LONGER = (*TASK, "position=rope", "validation.lengths=[40,8,16,24]")


def measured(run: Path) -> dict[str, float]:
    """The accuracies in the run's summary, without their common beginning."""
    metrics = summary(run)["metrics"]
    return {name[4:]: one for name, one in metrics.items() if name.startswith("val/accuracy")}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("run"), *LONGER)


def test_accuracies_by_length_and_slice_come_from_the_trained_weights(run):
    saved, expected = load_run(run, [__name__]), {}
    for length in (8, 16, 24, 40):
        generator = make_generator(VALIDATION, length if length != 16 else 0)
        ids, targets, labels = Halves(5, 9).draw(generator, 9, length)
        with torch.no_grad():
            logits = build_longer(saved.cfg, saved.model, length)(torch.from_numpy(ids))
        scored = targets != IGNORED
        right = logits.argmax(-1).numpy() == targets
        expected[f"accuracy_{length}"] = right[scored].mean()
        if length == 16:
            expected["accuracy"] = right[scored].mean()
            for i, name in enumerate(("half_1", "half_2")):
                expected[f"accuracy_{name}"] = right[scored & (labels == i)].mean()
    assert measured(run) == pytest.approx(expected)
    assert len({*expected.values()}) > 3
    assert [step for step, _ in series(run, "val/accuracy_40")] == [2, 4]


def test_other_lengths_change_nothing_else_in_a_run(run, tmp_path):
    plain = train(tmp_path, *LONGER[:-1])

    def others(run: Path) -> list[dict[str, float]]:
        clocks = ("time", "perf", "progress/seconds", "val/accuracy_")
        found = [{k: v for k, v in r.items() if not k.startswith(clocks)} for r in rows(run)]
        return [{k: v for k, v in row.items() if k != "val/accuracy_16"} for row in found]

    assert others(run) == others(plain)
    states = [load_run(one, [__name__]).model.state_dict() for one in (run, plain)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(a, b) for a, b in zip(*map(dict.values, states), strict=True))
    sizes = [one.stat().st_size for run in (run, plain) for one in run.glob("checkpoints/*4.*")]
    assert abs(sizes[0] - sizes[1]) < 2000  # names of metrics


def test_learned_positions_score_only_to_the_trained_length_and_say_so(tmp_path, capfd):
    run = train(tmp_path, *TASK, "position=learned", "validation.lengths=[8,16,24]")
    assert measured(run).keys() == {
        *("accuracy", "accuracy_8", "accuracy_16", "accuracy_half_1", "accuracy_half_2")
    }
    (said,) = [line for line in capfd.readouterr().out.splitlines() if "up to 16" in line]
    assert said.startswith("validation.lengths: ")
    assert "position=learned" in said


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ((), "validation.lengths: gptattn-evaluate"),  # of a text
        ((*TASK, "validation.lengths=[8,1]"), "validation.lengths: too short"),
        ((*TASK, "validation.lengths=[0]"), "validation.lengths[0]: whole number"),
        ((*TASK, "validation.lengths=[8.5]"), "validation.lengths[0]: whole number"),
        ((*TASK, "validation.lengths=8"), "validation.lengths: a list"),
    ],
)
def test_lengths_that_cannot_be_asked_are_refused(tmp_path, overrides, said):
    with refuses(said):
        check_job(tiny(tmp_path, "validation.lengths=[8]", *overrides))


def test_a_run_without_lengths_is_not_that_of_a_sweep_that_asks_for_them():
    plain, asked, other = (
        settings_key(asdict(settings(*TASK, *own)))
        for own in ((), ("validation.lengths=[8]",), ("validation.lengths=[9]",))
    )
    assert len({plain, asked, other}) == 3
    node = asdict(settings(*TASK))
    del node["validation"]["lengths"]  # as earlier versions recorded it
    complete_record(node)
    assert settings_key(node) == plain


def test_a_run_ends_once_each_length_that_is_asked_has_the_accuracy():
    budget = settings("data=parity", "tokenizer=none", "budget.accuracy=0.9").budget
    found = {"val/accuracy": 0.95, "val/accuracy_40": 0.95, "val/accuracy_pairs_4": 0.1}
    assert budget.reached(lowest_accuracy(found))
    assert not budget.reached(lowest_accuracy({**found, "val/accuracy_80": 0.5}))
    assert not budget.reached(lowest_accuracy({"val/loss": 0.1}))
