"""Builds the model, the tokenizer and the data of a run from its settings."""

import re
from dataclasses import replace
from functools import partial

from gptattn.attention.base import Attention
from gptattn.attention.parts.base import Part
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
from gptattn.position.base import HeadPosition, InputPosition
from gptattn.settings.config import MASK_DOCUMENTS, ModelConfig, TrainConfig
from gptattn.settings.construct import construct, find_target
from gptattn.settings.layers import build_layer, build_position, chosen_position
from gptattn.settings.values import check_type


def build_model(cfg: TrainConfig, vocab_size: int) -> GPT:
    """Build the GPT of these settings, on torch's current default device.

    Raises ConfigError, naming the field, if it cannot be built.
    """
    model, block, given = cfg.model, cfg.block, cfg.model.vocab_size
    if given is not None and given < vocab_size:
        raise ConfigError(
            "model.vocab_size",
            f"{given} is below the {vocab_size:,} ids of the data; give that many or more, or null",
        )
    for name, spec in cfg.part.items():
        if "_target_" not in spec:
            raise ConfigError(f"part.{name}", f"is not chosen; give part=[{name}] as well")
        target = find_target(f"part.{name}", spec, cfg.allow_targets)
        refuses = target.refuses if isinstance(target, type) and issubclass(target, Part) else {}
        for other in (*cfg.part, f"position={cfg.choices['position']}"):
            reason = refuses.get(other.removeprefix("position="))
            if reason is not None:
                raise ConfigError("part", f"{name} cannot be used with {other}: {reason}")

    encodings: dict[int, HeadPosition] | None = None
    in_input = None
    if cfg.position:
        kind = find_target("position", cfg.position, cfg.allow_targets)
        if not (isinstance(kind, type) and issubclass(kind, HeadPosition | InputPosition)):
            raise ConfigError("position._target_", "is neither a HeadPosition nor an InputPosition")
        if issubclass(kind, HeadPosition):
            encodings = {}
        else:
            in_input = build_position(cfg, model.num_heads)
    built = GPT(
        vocab_size=given or vocab_size,
        context_length=model.context_length,
        d_model=model.d_model,
        num_layers=model.num_layers,
        attention=partial(build_layer, cfg, encodings, {}),
        input_position=in_input,
        d_mlp=width_of_mlp(model),
        dropout=model.dropout,
        style=BlockStyle(
            block.norm, block.norm_eps, model.mlp, block.bias, zero_init=block.zero_init
        ),
        tied_head=block.tied_head,
        shared_init=cfg.shared_init,
        recompute=model.recompute,
    )

    chosen = f"attn={cfg.choices['attn']}" if cfg.pattern is None else "the pattern"
    if encodings == {}:
        raise ConfigError(
            "position",
            f"{chosen_position(cfg)} acts on queries and keys, and {chosen} knows the order of the "
            "tokens without them; use position=none, position=learned or position=sinusoidal",
        )
    attentions = [one.attention for one in built.layers()]
    modules = [named for attention in attentions for named in attention.named_modules()]
    taken = {name.rpartition(".")[2] for name, module in modules if isinstance(module, Part)}
    unused = [name for name in cfg.part if name not in taken]
    if unused:
        raise ConfigError(
            "part",
            f"{chosen} keeps no keys and values of each head that a part could change, so it "
            f"cannot take {', '.join(unused)}; leave "
            f"{'part' if len(unused) == len(cfg.part) else 'that'} out, or take another attention",
        )
    for layer, attention in enumerate(attentions):
        for module in attention.modules() if cfg.data.get(MASK_DOCUMENTS) else ():
            if isinstance(module, Attention | Part) and not module.keeps_documents:
                raise ConfigError(
                    f"data.{MASK_DOCUMENTS}",
                    f"{type(module).__name__} in layer {layer} does not keep documents apart; "
                    "leave one of the two out",
                )
    shared = [(layer, name) for layer, one in enumerate(attentions) for name in one.provides()]
    if shared and not any(attention.needs() for attention in attentions):
        layer, name = shared[0]
        said = f"layer {layer} provides {name}, and no later layer takes them"
        if cfg.pattern is None:
            raise ConfigError("model.num_layers", f"{said}; give the model more layers")
        order = attentions[layer].layer_order() or "put one that does after it"
        raise ConfigError("pattern", f"{said}; {order}")
    return built


def build_matrix_rule(cfg: TrainConfig) -> MatrixRule | None:
    """Build what updates the layers' matrices in place of AdamW; None if nothing does.

    Raises ConfigError, naming the field.
    """
    if cfg.optim.matrices is None:
        return None
    return construct("optim.matrices", cfg.optim.matrices, {}, cfg.allow_targets, MatrixRule)


def width_of_mlp(model: ModelConfig) -> int:
    """Return the hidden width of the MLP; 0 without one."""
    if model.mlp == "none":
        return 0
    return default_width(model.mlp, model.d_model) if model.d_mlp is None else model.d_mlp


def build_tokenizer(cfg: TrainConfig) -> Tokenizer:
    """Build the tokenizer; if its vocabulary comes from the text, it has none yet.

    Raises ConfigError or DataError, naming the field.
    """
    return construct("tokenizer", cfg.tokenizer, {}, cfg.allow_targets, Tokenizer)


def build_data(cfg: TrainConfig, tokenizer: Tokenizer | None = None) -> RunData:
    """Load the text of these settings and tokenize it, or draw the rows of their task.

    `tokenizer`: one that is built already. Raises DataError or ConfigError, naming the field, or
    DiskError if the cache cannot be used.
    """
    tokenizer = tokenizer or build_tokenizer(cfg)
    target = find_target("data", cfg.data, cfg.allow_targets)
    name = f"data={cfg.choices['data']}"
    if isinstance(target, type) and issubclass(target, Task):
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

    mask_documents = cfg.data.get(MASK_DOCUMENTS, False)
    check_type(f"data.{MASK_DOCUMENTS}", mask_documents, bool)
    content = build_content(cfg)
    if isinstance(content, Mixture):
        return _build_mixture(cfg, content, tokenizer, mask_documents)
    cache = cache_folder(cfg.cache_dir)
    if isinstance(content, PartedText):
        content = in_cache(content, tokenizer, cfg.choices["tokenizer"], cache)
    how = {
        "context_length": cfg.model.context_length,
        "val_fraction": cfg.validation.fraction,
        "mask_documents": mask_documents,
    }
    if not isinstance(content, StoredTokens):
        return load_tokens(lambda: content, tokenizer, **how, cache=cache)
    if isinstance(tokenizer, TaskIds) and cfg.sample.tokens:
        raise ConfigError("sample.tokens", f"{name} has no text that could go on; give 0")
    return stored_data(content, tokenizer, **how)


def _build_mixture(
    cfg: TrainConfig, mixture: Mixture, tokenizer: Tokenizer, mask_documents: bool
) -> MixtureData:
    check_tokenizer(tokenizer)
    sources = {}
    for name, spec in mixture.specs.items():
        target = find_target(f"data.sources.{name}", spec, cfg.allow_targets)
        if isinstance(target, type) and issubclass(target, Task):
            raise ConfigError(f"data.sources.{name}", "is no text; a mixture is of texts alone")
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


def build_content(cfg: TrainConfig) -> str | Corpus | PartedText | StoredTokens | Mixture:
    """Return the text of these settings, which may still have to be read, or its token ids.

    Raises DataError or ConfigError, naming the field.
    """
    shared = {"cache_dir": cfg.cache_dir, "val_fraction": cfg.validation.fraction}
    # How the text is used is nothing that a function which gives text has to know.
    spec = {key: value for key, value in cfg.data.items() if key != MASK_DOCUMENTS}
    found = construct("data", spec, shared, cfg.allow_targets)
    if not isinstance(found, str | Corpus | PartedText | StoredTokens | Mixture):
        raise ConfigError(
            "data._target_", "does not give text; name a function that returns a str or a Corpus"
        )
    return found
