"""Builds the model, the tokenizer and the data of a run from its settings."""

import inspect
from functools import partial

from gptattn.data.corpus import Corpus
from gptattn.data.run_data import RunData
from gptattn.data.task_data import TaskData
from gptattn.data.tasks import Task
from gptattn.data.text import cache_folder
from gptattn.data.tokenizer import TaskIds, Tokenizer
from gptattn.data.tokens import load_tokens
from gptattn.errors import ConfigError
from gptattn.model.block import BlockStyle
from gptattn.model.gpt import GPT
from gptattn.model.kinds import default_width
from gptattn.optim.matrix_rule import MatrixRule
from gptattn.settings.config import MASK_DOCUMENTS, ModelConfig, TrainConfig
from gptattn.settings.construct import construct, find_target
from gptattn.settings.layers import (
    Positions,
    build_layer,
    check_documents_are_kept_apart,
    check_parts,
    check_parts_are_used,
    check_position_is_used,
    check_what_passes_between_layers,
)
from gptattn.settings.values import check_type


def build_model(cfg: TrainConfig, vocab_size: int) -> GPT:
    """Build the GPT of these settings, on torch's current default device.

    Raises ConfigError, naming the field, if it cannot be built.
    """
    model, block = cfg.model, cfg.block
    check_vocabulary(cfg, vocab_size)
    check_parts(cfg)
    positions = Positions(cfg)
    built = GPT(
        vocab_size=model.vocab_size or vocab_size,
        context_length=model.context_length,
        d_model=model.d_model,
        num_layers=model.num_layers,
        attention=partial(build_layer, cfg, positions, set()),
        input_position=positions.in_input(),
        d_mlp=width_of_mlp(model),
        dropout=model.dropout,
        style=BlockStyle(
            block.norm, block.norm_eps, model.mlp, block.bias, zero_init=block.zero_init
        ),
        tied_head=block.tied_head,
    )
    check_parts_are_used(cfg, built)
    check_documents_are_kept_apart(cfg, built)
    check_position_is_used(cfg, built)
    check_what_passes_between_layers(cfg, built)
    return built


def build_matrix_rule(cfg: TrainConfig) -> MatrixRule | None:
    """Build what updates the layers' matrices in place of AdamW; None if nothing does.

    Raises ConfigError, naming the field.
    """
    if cfg.optim.matrices is None:
        return None
    rule = construct("optim.matrices", cfg.optim.matrices, {}, cfg.allow_targets)
    if not isinstance(rule, MatrixRule):
        raise ConfigError("optim.matrices._target_", "is not a gptattn.optim.MatrixRule")
    return rule


def width_of_mlp(model: ModelConfig) -> int:
    """Return the hidden width of the MLP; 0 without one."""
    if model.mlp == "none":
        return 0
    return default_width(model.mlp, model.d_model) if model.d_mlp is None else model.d_mlp


def check_vocabulary(cfg: TrainConfig, vocab_size: int) -> None:
    """Raise ConfigError if the model has fewer ids than the tokenizer."""
    given = cfg.model.vocab_size
    if given is not None and given < vocab_size:
        raise ConfigError(
            "model.vocab_size",
            f"{given} is below the {vocab_size:,} ids of the data; give that many or more, or null",
        )


def build_tokenizer(cfg: TrainConfig) -> Tokenizer:
    """Build the tokenizer; if its vocabulary comes from the text, it has none yet.

    Raises ConfigError or DataError, naming the field.
    """
    tokenizer = construct("tokenizer", cfg.tokenizer, {}, cfg.allow_targets)
    if not isinstance(tokenizer, Tokenizer):
        raise ConfigError("tokenizer._target_", "is not a gptattn.data.tokenizer.Tokenizer")
    return tokenizer


def build_data(cfg: TrainConfig, tokenizer: Tokenizer | None = None) -> RunData:
    """Load the text of these settings and tokenize it, or draw the rows of their task.

    `tokenizer`: one that is built already. Raises DataError or ConfigError, naming the field, or
    DiskError if the cache cannot be used.
    """
    tokenizer = tokenizer or build_tokenizer(cfg)
    target = find_target("data", cfg.data, cfg.allow_targets)
    if inspect.isclass(target) and issubclass(target, Task):
        return _build_task(cfg, tokenizer)
    mask_documents = cfg.data.get(MASK_DOCUMENTS, False)
    check_type(f"data.{MASK_DOCUMENTS}", mask_documents, bool)
    return load_tokens(
        partial(_build_text, cfg),
        tokenizer,
        context_length=cfg.model.context_length,
        val_fraction=cfg.validation.fraction,
        cache=cache_folder(cfg.cache_dir),
        mask_documents=mask_documents,
    )


def _build_task(cfg: TrainConfig, tokenizer: Tokenizer) -> TaskData:
    name = f"data={cfg.choices['data']}"
    if not isinstance(tokenizer, TaskIds):
        raise ConfigError(
            "tokenizer", f"{name} has ids of its own and no text; leave the tokenizer out"
        )
    if cfg.sample.tokens:
        raise ConfigError("sample.tokens", f"{name} has no text that could go on; give 0")
    task = construct("data", cfg.data, {}, cfg.allow_targets)
    task.check(cfg.model.context_length)
    tokenizer.become(task.vocab_size)
    return TaskData(task, cfg.model.context_length, tokenizer)


def _build_text(cfg: TrainConfig) -> str | Corpus:
    # How the text is used is nothing that a function which gives text has to know.
    spec = {key: value for key, value in cfg.data.items() if key != MASK_DOCUMENTS}
    text = construct("data", spec, {"cache_dir": cfg.cache_dir}, cfg.allow_targets)
    if not isinstance(text, str | Corpus):
        raise ConfigError(
            "data._target_", "does not give text; name a function that returns a str or a Corpus"
        )
    return text
