"""Measuring speeds: turns in random order, of the step and the cache that a run has."""

from collections import Counter
from dataclasses import replace

import torch
from support import cached_settings, process_state, refuses, tiny, train
from torch import Tensor, nn

from gptattn.runs.folder import RunFolder
from gptattn.training.preflight import preflight
from gptattn.training.speed import (
    MAX_ROUNDS,
    decode_tokens,
    interleave,
    measure_speeds,
    prepare,
    train_steps,
)

CALLS: list[tuple[bool, bool, torch.Size]] = []


class Noted(nn.Module):
    """A causal module without a cache, which notes how it is called."""

    def __init__(self, d_in: int) -> None:
        super().__init__()
        self.linear = nn.Linear(d_in, d_in)

        self.gain = torch.ones(1).item()  # which a tensor without values lacks

    def forward(self, x: Tensor) -> Tensor:
        CALLS.append((self.training, torch.is_grad_enabled(), x.shape))
        return self.gain * self.linear(x)


def test_each_takes_one_turn_a_round_in_changing_order():
    order: list[str] = []

    def turn(name: str) -> float:
        order.append(name)
        return float(len(order))

    names = ["a", "b", "c"]
    found = interleave({name: lambda name=name: turn(name) for name in names}, 6)
    rounds = [tuple(order[i : i + 3]) for i in range(0, 18, 3)]
    assert all(sorted(one) == names for one in rounds)
    assert len({*rounds}) > 2
    assert {name: len(own) for name, own in found.items()} == dict.fromkeys(names, 6)
    assert found["a"] == [float(i + 1) for i, name in enumerate(order) if name == "a"]


def test_rounds_end_when_enough_is_known():
    found = interleave({"a": lambda: 1.0}, MAX_ROUNDS, lambda seconds: len(seconds["a"]) == 4)
    assert found == {"a": [1.0] * 4}


def test_a_turn_of_training_takes_the_runs_own_steps(tmp_path):
    given = tiny(tmp_path, "batch_size=4", "accumulate=2", "model.num_layers=1", "position=none")
    own = {"attn": {"_target_": f"{__name__}.Noted"}, "allow_targets": [__name__]}
    with process_state():
        prepared = preflight(replace(cached_settings(*given), **own), shapes_only=True)
        CALLS.clear()
        assert train_steps(prepared, 3) > 0
    sizes = (2, prepared.cfg.model.context_length, prepared.cfg.model.d_model)
    # One step to warm up and three, of two micro-batches each; nothing is validated.
    assert Counter(CALLS) == {(True, True, sizes): 8}


def test_decoding_is_timed_up_to_a_full_context(tmp_path):
    with process_state():
        prepared = preflight(cached_settings(*tiny(tmp_path)), shapes_only=True)
        context = prepared.cfg.model.context_length
        assert decode_tokens(prepared, 8, context - 1) > 0


def test_a_run_of_a_sweep_is_measured_as_it_would_train_alone(tmp_path):
    run = train(tmp_path, "++trainer.threads=1", "sweep.beside_others=true")
    typed = train(tmp_path / "typed", "trainer.threads=1")
    with process_state():
        assert prepare(run)[2].cfg.trainer.threads is None
        assert prepare(typed)[2].cfg.trainer.threads == 1


def test_speeds_of_all_variants_are_one_session(tmp_path, monkeypatch):
    monkeypatch.setattr("gptattn.training.speed.MOST_SECONDS", 1e6)  # however busy the machine is
    monkeypatch.setattr("gptattn.training.speed.TRAINING_SECONDS", 0.03)
    monkeypatch.setattr("gptattn.training.speed.DECODING_SECONDS", 0.01)
    runs = {name: train(tmp_path / name, f"attn={name}") for name in ("mha", "gqa")}
    with process_state():
        variants = {name: prepare(run) for name, run in runs.items()}
        asked: list[int] = []

        def is_enough(seconds: dict[str, list[float]]) -> bool:
            asked.append(len(seconds["gqa"]))
            return True

        session = measure_speeds(variants, is_enough)
    assert asked == [5]  # the fewest rounds
    turns = [session.variants[variants[name][0]] for name in runs]
    assert [[len(one.step), *map(len, one.token.values())] for one in turns] == [[5, 5, 5]] * 2
    assert len(turns[0].matmul) == 5
    assert turns[0].code == RunFolder(runs["mha"]).read_provenance().digest


def test_a_run_of_other_code_is_not_measured(tmp_path):
    run = RunFolder(train(tmp_path))
    made = run.read_provenance()
    run.write_provenance(replace(made, code=made.code | {"gptattn.model.gpt": "0"}))
    with process_state(), refuses("speed: different code"):
        prepare(run.path)
