"""Fingerprints: shipped results stand as long as the code gives them the same numbers.

If one fails, the mathematics of that entry has changed. If it was meant,
`scripts/track_fingerprints.py` says how its results become stale until they are made again.
"""

import pytest

from gptattn.compare.battery import RECALL, Result
from gptattn.compare.finished_runs import SHIPPED
from gptattn.compare.track import Entry, read_shipped
from gptattn.training import fingerprint
from gptattn.training.fingerprint import FingerprintCache, agrees, compute_fingerprint

# One of each kind: softmax, shared state, a part, a recurrence, a pattern, positions.
QUICK = {
    "track": (
        "gqa",
        "cross_layer",
        "mha part=[forget] position=none",
        "recipe=gemma3",
        "pattern=[gated_deltanet,sliding]",
    ),
    "track_gate": ("kda position=none",),
    "battery": ("mha",),
}
ENTRIES = [
    pytest.param(
        experiment,
        entry,
        id=f"{experiment}: {entry.name}, {getattr(entry, 'steps', '')}",
        marks=[] if entry.name in QUICK[experiment] else pytest.mark.slow,
    )
    for experiment, folder in SHIPPED.items()
    for entry in read_shipped(folder, Result if experiment == "battery" else Entry)
    if not entry.stale and getattr(entry, "task", RECALL) == RECALL  # one of each row
]


@pytest.mark.parametrize(("experiment", "entry"), ENTRIES)
def test_the_code_gives_a_shipped_result_its_fingerprint(experiment, entry):
    assert len(entry.fingerprint) == 6  # three steps, a validation, FLOPs and parameters
    assert agrees(entry.fingerprint, compute_fingerprint(entry.list_overrides(experiment)))


def shipped(name: str) -> Entry:
    entries = read_shipped(SHIPPED["track"], Entry)
    return next(one for one in entries if one.name == name and not one.is_baseline)


# Settings stand for the code that they reach: the second differs from the track's by little.
@pytest.mark.parametrize(
    ("entry", "change"),
    [
        ("gqa", "optim.grad_clip=1.1"),  # of the three steps, the second is clipped
        pytest.param("gqa", "optim.matrices.momentum=0.951", marks=pytest.mark.slow),
        pytest.param("gqa", "optim.warmup_fraction=0.051", marks=pytest.mark.slow),
        pytest.param("gqa", "optim.beta2=0.98", marks=pytest.mark.slow),
        pytest.param("gqa", "optim.weight_decay=0.101", marks=pytest.mark.slow),
        pytest.param("gqa", "optim.decay=cosine", marks=pytest.mark.slow),
        pytest.param("gqa", "attn.scale=0.3536", marks=pytest.mark.slow),
        pytest.param("gqa", "position.base=10001", marks=pytest.mark.slow),
        pytest.param("gqa", "data.even_windows=false", marks=pytest.mark.slow),
        pytest.param("gqa", "seed=2", marks=pytest.mark.slow),
        ("sliding", "attn.window=9"),
        pytest.param("mha part=[softcap]", "part.softcap.cap=51", marks=pytest.mark.slow),
    ],
)
def test_a_fingerprint_shows_a_small_change_of_the_mathematics(entry, change):
    known = shipped(entry)
    changed = compute_fingerprint([*known.list_overrides("track"), change])
    assert not agrees(known.fingerprint, changed)


@pytest.mark.parametrize(
    "unseen",
    [
        # The part's first 8,192 tokens have a temperature of 1.
        "trainer.precision=bf16-mixed batch_size=8 model.d_model=64 match=flops part=[temperature]",
        pytest.param("compile=true loss_chunk_tokens=7", marks=pytest.mark.slow),
    ],
)
def test_fingerprints_ignore_precision_width_and_effects_past_the_context(unseen):
    known = shipped("gqa")
    same = compute_fingerprint([*known.list_overrides("track"), *unseen.split()])
    assert agrees(known.fingerprint, same)


def test_fingerprints_agree_to_eight_digits():
    assert agrees([5.5, 4.0], [5.5 + 5e-8, 4.0])
    assert not agrees([5.5, 4.0], [5.5 + 6e-8, 4.0])
    assert not agrees([5.5], [5.5, 4.0])


def test_a_fingerprint_is_computed_once_and_a_damaged_file_counts_as_none(tmp_path, monkeypatch):
    file, asked = tmp_path / "new" / "fingerprints.json", []
    monkeypatch.setattr(
        fingerprint, "compute_fingerprint", lambda given: asked.append(given) or [5.5]
    )
    overrides = ["experiment=track", "attn=mha"]
    for _ in range(2):
        assert FingerprintCache(file).compute(overrides, "mha") == [5.5]
    assert asked == [overrides]
    good = file.read_text()
    for i, text in enumerate((good.replace('"', '"0', 1), "[]", "{"), start=2):
        file.write_text(text)
        FingerprintCache(file).compute(overrides, "mha")
        assert len(asked) == i
