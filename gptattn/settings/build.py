"""Builds the model, the tokenizer and the data of a run from its settings."""

from functools import partial

from gptattn.attention.base import Attention
from gptattn.attention.parts.base import Part
from gptattn.data.run_data import Request, RunData, Source
from gptattn.data.text import HeldText, PlainText, cache_folder
from gptattn.data.tokenizer import TaskIds, Tokenizer
from gptattn.errors import ConfigError
from gptattn.model.gpt import GPT, BlockStyle
from gptattn.optim.matrix_rule import MatrixRule
from gptattn.position.base import HeadPosition, InputPosition
from gptattn.settings.config import MASK_DOCUMENTS, ModelConfig, Spec, TrainConfig, default_width
from gptattn.settings.construct import construct, find_target
from gptattn.settings.layers import build_layer, build_position, name_position
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
        d_mlp=choose_mlp_width(model),
        dropout=model.dropout,
        style=BlockStyle(
            block.norm, block.norm_eps, model.mlp, block.bias, zero_init=block.zero_init
        ),
        tied_head=block.tied_head,
        shared_init=cfg.shared_init,
        activation_checkpointing=model.activation_checkpointing,
    )

    chosen = f"attn={cfg.choices['attn']}" if cfg.pattern is None else "the pattern"
    if encodings == {}:
        raise ConfigError(
            "position",
            f"{name_position(cfg)} acts on queries and keys, and {chosen} knows the order of the "
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


def choose_mlp_width(model: ModelConfig) -> int:
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
    request = build_request(cfg, tokenizer or build_tokenizer(cfg))
    data = request.make("data", cfg.data).load(request)
    if cfg.sample.tokens and isinstance(data.tokenizer, TaskIds):
        raise ConfigError(
            "sample.tokens", f"{request.data_name} has no text that could go on; give 0"
        )
    return data


def build_request(cfg: TrainConfig, tokenizer: Tokenizer) -> Request:
    """Return what these settings ask of a source of data."""
    mask_documents = cfg.data.get(MASK_DOCUMENTS, False)
    check_type(f"data.{MASK_DOCUMENTS}", mask_documents, bool)
    return Request(
        tokenizer=tokenizer,
        context_length=cfg.model.context_length,
        val_fraction=cfg.validation.fraction,
        mask_documents=mask_documents,
        cache=cache_folder(cfg.cache_dir),
        data_name=f"data={cfg.choices['data']}",
        tokenizer_name=cfg.choices["tokenizer"],
        make=partial(_build_source, cfg),
    )


def _build_source(cfg: TrainConfig, group: str, spec: Spec) -> Source:
    # How the text is used is nothing that its source has to know.
    own = {key: value for key, value in spec.items() if key != MASK_DOCUMENTS}
    found = construct(group, own, {"cache_dir": cfg.cache_dir}, cfg.allow_targets)
    if isinstance(found, str):  # a function of the user's
        return PlainText([HeldText(found)])
    if not isinstance(found, Source):
        raise ConfigError(
            f"{group}._target_",
            "does not give text; name a gptattn.data.run_data.Source, or a function that returns "
            "a str",
        )
    return found
