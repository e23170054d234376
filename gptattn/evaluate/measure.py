"""Measures a finished run: checks which questions it can answer, and reuses earlier answers.

A question is a length of windows in tokens, a kind of cache, or a task of the harness.
"""

import hashlib
import json
from importlib.metadata import version
from pathlib import Path

import msgspec

from gptattn.build.longer import build_longer, check_length
from gptattn.data.tokens import TokenData
from gptattn.errors import CheckpointError, ConfigError
from gptattn.evaluate.caches import CacheKind, check_kind
from gptattn.evaluate.losses import measure_by_cache, measure_by_position
from gptattn.machine.source_code import hash_code
from gptattn.runs.evaluation import Basis, Evaluation
from gptattn.runs.folder import step_of
from gptattn.runs.load import SavedRun
from gptattn.settings.identity import hash_code_for


def check_unchanged(saved: SavedRun, data: TokenData, text: str, steps: int) -> None:
    """Raise ConfigError if the text has changed since the run, CheckpointError for older weights.

    `text` and `steps` are from the finished run's summary: the text's sha256 and the last step.
    """
    if data.text_hash != text:
        raise ConfigError(
            "data", f"{saved.folder}: the text has changed since the run began; restore it"
        )
    if step_of(saved.source) != steps:
        raise CheckpointError(
            "run",
            f"{saved.folder} ended at step {steps}, but its newest readable weights are "
            f"{saved.source.name}; restore the final ones, or train it again",
        )


def check_question(saved: SavedRun, data: TokenData, question: int | CacheKind | str) -> None:
    """Raise ConfigError if the run cannot answer it."""
    if isinstance(question, str):
        return
    if isinstance(question, CacheKind):
        if data.val_documents is not None:
            raise ConfigError(
                "cache", "this run keeps documents apart, and a cache cannot; use lengths instead"
            )
        check_kind(saved.model, question, saved.cfg.variant)
        return
    most = len(data.val) - 1  # the first token is only context
    if question > most:
        raise ConfigError(
            "lengths", f"{question} is longer than the held-out text; use at most {most}"
        )
    check_length(saved.cfg, saved.model, question)


def begin_evaluation(saved: SavedRun, data: TokenData, stored: Evaluation | None) -> Evaluation:
    """Return `stored` if it has the same weights, text, device and code, else an empty one."""
    code = hash_code_for(saved.cfg) | hash_code(["gptattn.evaluate.losses"], ["gptattn.evaluate"])
    digest = hashlib.sha256(json.dumps(code, sort_keys=True).encode()).hexdigest()
    with saved.source.open("rb") as opened:
        weights = hashlib.file_digest(opened, "sha256").hexdigest()
    device = saved.model.head.weight.device.type
    basis = Basis(weights, data.text_hash, digest[:16], device)
    if stored is not None and stored.basis == basis:
        return stored
    return Evaluation(basis, step_of(saved.source), saved.cfg.model.context_length)


def measure(
    saved: SavedRun, data: TokenData, question: int | CacheKind | str, found: Evaluation
) -> Evaluation:
    """Return `found` with the answer to a question, or unchanged if it already has the answer.

    The run must be able to answer it. The model can be on any device; its weights are in float32.
    """
    if isinstance(question, str):
        answered = {(one.request, one.harness) for one in found.tasks.values()}
        if (question, version("lm_eval")) in answered and not Path(question).is_file():
            return found
        from gptattn.evaluate.harness import score_tasks  # the extra lm-eval, which takes seconds

        return msgspec.structs.replace(found, tasks=found.tasks | score_tasks(saved, question))
    if isinstance(question, CacheKind):
        if question.name in found.caches:
            return found
        by_cache = measure_by_cache(saved.model, data.val, question)
        return msgspec.structs.replace(found, caches=found.caches | {question.name: by_cache})
    if question in found.lengths:
        return found
    model, trained = saved.model, saved.cfg.model.context_length
    model = build_longer(saved.cfg, model, question)
    by_position = measure_by_position(model, data.val, question, trained, data.val_documents)
    return msgspec.structs.replace(found, lengths=found.lengths | {question: by_position})
