"""Builds the attention of each layer, with its position and parts, and checks how layers fit."""

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from gptattn.attention.base import Attention
from gptattn.attention.capabilities import HasParts
from gptattn.attention.parts.part import Part
from gptattn.errors import ConfigError
from gptattn.model.gpt import GPT
from gptattn.position.base import HeadPosition, InputPosition
from gptattn.settings.config import MASK_DOCUMENTS, BlockConfig, ModelConfig, Spec, TrainConfig
from gptattn.settings.construct import SETTING_OF, construct, find_target, named_arguments


def build_layer(
    cfg: TrainConfig, encodings: dict[int, HeadPosition] | None, left: set[str], layer: int
) -> Attention:
    """Build the attention of one layer, with its position and the parts that it takes.

    `encodings`: number of heads -> the position that layers with so many share, to which this adds;
    None if positions do not act in attentions. `left`: the names of what earlier layers leave for
    later ones; this layer's are added.
    """
    group, spec = cfg.attn_of(layer)
    try:
        for name in ("d_in", "d_out", "context_length"):
            if name in spec:
                raise ConfigError(
                    f"{group}.{name}", f"comes from the model; set {SETTING_OF[name]} instead"
                )
        target = find_target(group, spec, cfg.allow_targets)
        ordered = isinstance(target, type) and issubclass(target, Attention) and target.knows_order
        position = None
        if encodings is not None and not ordered:
            takes = inspect.signature(target).parameters
            if "position" not in takes:
                name = f"attn={cfg.choices['attn']}" if group == "attn" else group.split(".")[1]
                raise ConfigError(
                    "position",
                    f"{_chosen_position(cfg)} acts in the attention, and {name} takes no position; "
                    "use position=learned or position=sinusoidal",
                )
            heads = spec.get("num_heads", cfg.model.num_heads) if "num_heads" in takes else 1
            if type(heads) is not int or heads < 1:
                raise ConfigError(f"{group}.num_heads", f"{heads!r} is not a positive whole number")
            if heads not in encodings:
                encodings[heads] = build_position(cfg, heads)
            position = encodings[heads]
        shared = shared_arguments(cfg.model, cfg.block) | {"position": position, "layer": layer}
        attention = construct(group, spec, shared, cfg.allow_targets)
        if not isinstance(attention, Attention):
            raise ConfigError(f"{group}._target_", "is not a gptattn.attention.Attention")
        add_parts(attention, cfg.part, layer, cfg.allow_targets, left)
        # A variant may check an argument only in `rule()`, which making a cache calls.
        with named_arguments(group, spec):
            attention.new_cache(1, 1)
    except ConfigError as error:
        top, _, name = error.field.partition(".")
        if top != "pattern_attn":
            raise
        raise ConfigError("pattern", f"{name}: {error.message}") from error  # as the user wrote it
    left.update(attention.leaves())
    return attention


def build_position(cfg: TrainConfig, heads: int) -> Any:
    """Build the chosen position encoding, for attentions with so many heads if it acts in them."""
    shared = {
        "context_length": cfg.model.context_length,
        "d_model": cfg.model.d_model,
        "num_heads": heads,
        "head_dim": cfg.model.d_model // heads,
    }
    return construct("position", cfg.position, shared, cfg.allow_targets)


def add_parts(
    attention: Attention,
    parts: Mapping[str, Spec],
    layer: int,
    allow_targets: Sequence[str] = (),
    left: Collection[str] = (),
) -> None:
    """Build the parts for the sizes of this attention and add those that it takes, in this order.

    `left`: the names of what earlier layers leave for later ones.
    """
    if not isinstance(attention, HasParts):
        return
    shared = {
        "d_in": attention.d_in,
        "num_heads": attention.num_heads,
        "num_kv_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "context_length": attention.context_length,
        "layer": layer,
        "left": frozenset(left),
    }
    for name, spec in parts.items():
        part = construct(f"part.{name}", spec, shared, allow_targets)
        if not isinstance(part, Part):
            raise ConfigError(f"part.{name}._target_", "is not a gptattn.attention.parts.Part")
        if attention.takes(type(part)):
            with named_arguments(f"part.{name}", spec):
                attention.add_part(name, part)


def shared_arguments(model: ModelConfig, block: BlockConfig) -> dict[str, Any]:
    """Return the arguments that an attention gets, beside its YAML's keys, if it declares them.

    It can also declare `position`, a HeadPosition or None, and `layer`, counted from 0.
    """
    return {
        "d_in": model.d_model,
        "d_out": model.d_model,
        "context_length": model.context_length,
        "num_heads": model.num_heads,
        "dropout": model.dropout,
        "qkv_bias": model.qkv_bias,
        "out_bias": block.bias,
    }


def check_layers(cfg: TrainConfig, model: GPT) -> None:
    """Raise ConfigError for what no layer uses, and for layers that do not fit each other."""
    attentions = [block.attention for block in model.layers()]
    chosen = f"attn={cfg.choices['attn']}" if cfg.pattern is None else "the pattern"
    modules = [module for attention in attentions for module in attention.named_modules()]
    taken = {name.rpartition(".")[2] for name, module in modules if isinstance(module, Part)}
    unused = [name for name in cfg.part if name not in taken]
    if unused:
        lacks = "has no heads of queries, keys and values"
        if any(isinstance(attention, HasParts) for attention in attentions):
            lacks = "keeps no keys and values of each head that a part could change"
        raise ConfigError(
            "part",
            f"{chosen} {lacks}, so it cannot take {', '.join(unused)}; leave "
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
    acts = isinstance(model.input_position, InputPosition) or not cfg.position
    if not acts and all(attention.knows_order for attention in attentions):
        raise ConfigError(
            "position",
            f"{_chosen_position(cfg)} acts on queries and keys, and {chosen} knows the order of "
            "the tokens without them; use position=none, position=learned or position=sinusoidal",
        )
    field = "attn" if cfg.pattern is None else "pattern"
    left: dict[str, tuple[int, str]] = {}
    taken_on = False
    for layer, attention in enumerate(attentions):
        for name, sizes in attention.needs().items():
            taken_on = True
            begin = f"layer {layer} needs {name} ({sizes}), and"
            if name not in left:
                order = attention.layer_order() or "put one that does before it"
                raise ConfigError(field, f"{begin} no earlier layer leaves them; {order}")
            before, found = left[name]
            if found != sizes:
                raise ConfigError(
                    field,
                    f"{begin} layer {before} leaves others ({found}); make these the same in both "
                    "layers",
                )
        left |= {name: (layer, sizes) for name, sizes in attention.leaves().items()}
    if left and not taken_on:
        name, (layer, _) = next(iter(left.items()))
        said = f"layer {layer} leaves {name}, and no later layer takes them"
        if cfg.pattern is None:
            raise ConfigError("model.num_layers", f"{said}; give the model more layers")
        order = attentions[layer].layer_order() or "put one that does after it"
        raise ConfigError(field, f"{said}; {order}")


def _chosen_position(cfg: TrainConfig) -> str:
    """Return the name of the encoding, and that of the block, which can bring it with it."""
    return f"{cfg.choices['position']} (from block={cfg.choices['block']} if you did not choose it)"
