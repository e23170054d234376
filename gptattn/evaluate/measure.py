"""Measure a finished run: what it can answer, and what an earlier evaluation already knows."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from gptattn.data.tokens import TokenData
from gptattn.errors import CheckpointError, ConfigError
from gptattn.evaluate.caches import CacheKind, check_kind
from gptattn.evaluate.longer import build_longer, check_length
from gptattn.evaluate.losses import count_scored, measure_by_cache, measure_by_position
from gptattn.machine.source_code import hash_code
from gptattn.runs.evaluation import Basis, Evaluation
from gptattn.runs.folder import step_of
from gptattn.runs.load import SavedRun
from gptattn.settings.identity import hash_code_for

OURS = "gptattn.evaluate"
MEASURES = [f"{OURS}.losses"]


@dataclass(frozen=True)
class Request:
    """What to measure: lengths of windows, in tokens, and kinds of caches."""

    lengths: tuple[int, ...] = ()
    kinds: tuple[CacheKind, ...] = ()


@dataclass(frozen=True)
class Answer:
    """Everything known about the run so far, and the latest question answered."""

    evaluation: Evaluation
    question: int | CacheKind
    new: bool  # False: an earlier evaluation had it already


def check_unchanged(saved: SavedRun, data: TokenData, text: str, steps: int) -> None:
    """Raise ConfigError if the text has changed since the run, CheckpointError for older weights.

    `text` and `steps` are what the finished run's summary says: the text's sha256 and its end.
    """
    if data.text_hash != text:
        raise ConfigError(
            "data", f"{saved.folder}: the text has changed since the run began; restore it"
        )
    if step_of(saved.source) != steps:
        raise CheckpointError(
            "run",
            f"{saved.folder} ended at step {steps}, and the newest weights that can be "
            f"read are {saved.source.name}; restore the others, or train it again",
        )


def select_possible(
    saved: SavedRun, data: TokenData, request: Request
) -> tuple[Request, list[ConfigError]]:
    """Return the part of the request that the run can answer, and why not the rest.

    Lengths ascend: the first that is too long gives the reason for all.
    """
    lengths, kinds, refused = list[int](), list[CacheKind](), list[ConfigError]()
    for length in request.lengths:
        try:
            _check_fits(length, data)
            check_length(saved.cfg, saved.model, length)
            lengths.append(length)
        except ConfigError as error:
            refused.append(error)
            break
    for kind in request.kinds:
        try:
            if data.val_documents is not None:
                raise ConfigError(
                    "cache", "a cache cannot keep documents apart, as the run did; give lengths"
                )
            check_kind(saved.model, kind, saved.cfg.variant)
            kinds.append(kind)
        except ConfigError as error:
            refused.append(error)
    return Request(tuple(lengths), tuple(kinds)), refused


def _check_fits(length: int, data: TokenData) -> None:
    most = count_scored(data.val)
    if length > most:
        raise ConfigError(
            "lengths", f"{length} is longer than the held-out text; give at most {most}"
        )


def measure(
    saved: SavedRun, data: TokenData, request: Request, known: Evaluation | None
) -> Iterator[Answer]:
    """Yield an answer for each length and kind of the request, all of which must be possible.

    Answers in `known` for the same weights, text and code are not measured again. The model may be
    on any device; its weights are in float32.
    """
    device = saved.model.head.weight.device
    basis = _basis(saved, data, device)
    trained = saved.cfg.model.context_length
    found = known
    if found is None or found.basis != basis:
        found = Evaluation(basis, step_of(saved.source), trained)
    lengths = [length for length in request.lengths if length not in found.lengths]
    model = build_longer(saved, max(lengths, default=0))
    for length in request.lengths:
        new = length in lengths
        if new:
            loss = measure_by_position(model, data.val, length, trained, data.val_documents)
            found = msgspec.structs.replace(found, lengths=found.lengths | {length: loss})
        yield Answer(found, length, new)
    for kind in request.kinds:
        new = kind.name not in found.caches
        if new:
            loss = measure_by_cache(saved.model, data.val, kind)
            found = msgspec.structs.replace(found, caches=found.caches | {kind.name: loss})
        yield Answer(found, kind, new)


def _basis(saved: SavedRun, data: TokenData, device: torch.device) -> Basis:
    code = hash_code_for(saved.cfg) | hash_code(MEASURES, [OURS])
    digest = hashlib.sha256(json.dumps(code, sort_keys=True).encode()).hexdigest()
    return Basis(_digest(saved.source), data.text_hash, digest[:16], device.type)


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
