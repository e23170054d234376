"""Builds the model, the tokenizer and the data of a run from its settings."""

import inspect
import re
from dataclasses import replace
from functools import partial

from gptattn.data.corpus import Corpus
from gptattn.data.mixture import Mixture, MixtureData, check_tokenizer
from gptattn.data.prepare import PartedText
from gptattn.data.run_data import RunData
from gptattn.data.stored import StoredTokens, in_cache, stored_data
from gptattn.data.task_data import TaskData
from gptattn.data.tasks import Task
from gptattn.data.text import cache_folder
from gptattn.data.tokenizer import TaskIds, Tokenizer
from gptattn.data.tokens import load_tokens
from gptattn.errors import ConfigError, UserError
from gptattn.model.block import BlockStyle
from gptattn.model.gpt import GPT
from gptattn.model.kinds import default_width
from gptattn.optim.matrix_rule import MatrixRule
from gptattn.settings.config import MASK_DOCUMENTS, ModelConfig, Spec, TrainConfig
from gptattn.settings.construct import construct, find_target
from gptattn.settings.layers import Positions, build_layer, check_layers, check_parts
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
        shared_init=cfg.shared_init,
        recompute=model.recompute,
    )
    check_layers(cfg, built)
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
    if target is Mixture:
        return _build_mixture(cfg, tokenizer, mask_documents)
    content, cache = build_content(cfg), cache_folder(cfg.cache_dir)
    if isinstance(content, PartedText):
        content = in_cache(content, tokenizer, cfg.choices["tokenizer"], cache)
    how = {
        "context_length": cfg.model.context_length,
        "val_fraction": cfg.validation.fraction,
        "mask_documents": mask_documents,
    }
    if isinstance(content, StoredTokens):
        if isinstance(tokenizer, TaskIds):
            _check_no_sample(cfg)
        return stored_data(content, tokenizer, **how)
    return load_tokens(lambda: content, tokenizer, **how, cache=cache)


def _build_task(cfg: TrainConfig, tokenizer: Tokenizer) -> TaskData:
    if not isinstance(tokenizer, TaskIds):
        name = f"data={cfg.choices['data']}"
        raise ConfigError(
            "tokenizer", f"{name} has ids of its own and no text; leave the tokenizer out"
        )
    _check_no_sample(cfg)
    task = construct("data", cfg.data, {}, cfg.allow_targets)
    task.check(cfg.model.context_length)
    tokenizer.become(task.vocab_size)
    return TaskData(task, cfg.model.context_length, tokenizer)


def _build_mixture(cfg: TrainConfig, tokenizer: Tokenizer, mask_documents: bool) -> MixtureData:
    mixture = construct("data", _of_target(cfg), {}, cfg.allow_targets)
    check_tokenizer(tokenizer)
    sources = {}
    for name, spec in mixture.specs.items():
        one = replace(cfg, data={**spec, MASK_DOCUMENTS: mask_documents})
        try:
            sources[name] = build_data(one, tokenizer)
        except UserError as error:
            # The text does not know that it is one of several.
            if error.field == f"data.{MASK_DOCUMENTS}":  # of all together
                raise type(error)(error.field, f"data.sources.{name}: {error.message}") from None
            field = re.sub(r"^data\b", f"data.sources.{name}", error.field)
            raise type(error)(field, error.message) from None
    if any(source.val_bytes is None for source in sources.values()):
        raise ConfigError("data.sources", "must all be texts, under a tokenizer")
    return MixtureData(sources, mixture.weights, tokenizer)


def _check_no_sample(cfg: TrainConfig) -> None:
    if cfg.sample.tokens:
        name = f"data={cfg.choices['data']}"
        raise ConfigError("sample.tokens", f"{name} has no text that could go on; give 0")


def _of_target(cfg: TrainConfig) -> Spec:
    # How the text is used is nothing that a function which gives text has to know.
    return {key: value for key, value in cfg.data.items() if key != MASK_DOCUMENTS}


def build_content(cfg: TrainConfig) -> str | Corpus | PartedText | StoredTokens:
    """Return the text of these settings, which may still have to be read, or its token ids.

    Raises DataError or ConfigError, naming the field.
    """
    shared = {"cache_dir": cfg.cache_dir, "val_fraction": cfg.validation.fraction}
    found = construct("data", _of_target(cfg), shared, cfg.allow_targets)
    if not isinstance(found, str | Corpus | PartedText | StoredTokens):
        raise ConfigError(
            "data._target_", "does not give text; name a function that returns a str or a Corpus"
        )
    return found
