"""Builds the attention of a layer, with its position and parts."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from gptattn.attention.base import Attention
from gptattn.attention.parts.base import Part
from gptattn.attention.softmax import SoftmaxAttention
from gptattn.errors import ConfigError
from gptattn.position.base import HeadPosition
from gptattn.settings.config import BlockConfig, ModelConfig, Spec, TrainConfig
from gptattn.settings.construct import (
    FILLED_BY,
    arguments_of,
    construct,
    find_target,
    named_arguments,
)


def build_layer(
    cfg: TrainConfig,
    encodings: dict[int, HeadPosition] | None,
    provided: dict[str, tuple[int, str]],
    layer: int,
) -> Attention:
    """Build the attention of one layer, with its position and the parts that it takes.

    `encodings`: number of heads -> the position that layers with so many share, to which this adds;
    None if positions do not act in attentions. `left`: what earlier layers share with later ones,
    name -> the layer and its sizes, to which this adds.
    """
    group, spec = cfg.attn_of(layer)
    for name in ("d_in", "d_out", "context_length"):
        if name in spec:
            raise ConfigError(
                f"{group}.{name}", f"comes from the model; set {FILLED_BY[name]} instead"
            )
    target = find_target(group, spec, cfg.allow_targets)
    ordered = isinstance(target, type) and issubclass(target, Attention) and target.knows_order
    position = None
    if encodings is not None and not ordered:
        takes = arguments_of(target).types
        if "position" not in takes:
            raise ConfigError(
                "position",
                f"{name_position(cfg)} acts in the attention, and {target.__name__} takes no "
                "position; use position=learned or position=sinusoidal",
            )
        heads = spec.get("num_heads", cfg.model.num_heads) if "num_heads" in takes else 1
        if type(heads) is not int or heads < 1:
            raise ConfigError(f"{group}.num_heads", f"{heads!r} is not a positive whole number")
        if heads not in encodings:
            encodings[heads] = build_position(cfg, heads)
        position = encodings[heads]
    shared = shared_arguments(cfg.model, cfg.block) | {"position": position, "layer": layer}
    attention = construct(group, spec, shared, cfg.allow_targets, Attention)
    add_parts(attention, cfg.part, layer, cfg.allow_targets, provided)
    # A variant may check an argument only in `rule()`, which making a cache calls.
    with named_arguments(group, spec):
        attention.new_cache(1, 1)
    for name, sizes in attention.needs().items():
        before, found = provided.get(name, (None, ""))
        if found != sizes:
            lack = f"layer {before} provides others ({found}); make these the same in both layers"
            if before is None:
                order = attention.layer_order() or "put one that does before it"
                lack = f"no earlier layer provides them; {order}"
            field = group.partition(".")[0]
            raise ConfigError(field, f"layer {layer} needs {name} ({sizes}), and {lack}")
    provided.update({name: (layer, sizes) for name, sizes in attention.provides().items()})
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
    provided: Collection[str] = (),
) -> None:
    """Build the parts for the sizes of this attention and add those that it takes, in this order.

    `provided`: the names of what earlier layers share with later ones.
    """
    if not isinstance(attention, SoftmaxAttention):
        return
    shared = {
        "d_in": attention.d_in,
        "num_heads": attention.num_heads,
        "num_kv_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "context_length": attention.context_length,
        "layer": layer,
        "provided": frozenset(provided),
    }
    for name, spec in parts.items():
        part = construct(f"part.{name}", spec, shared, allow_targets, Part)
        if attention.takes(type(part)):
            with named_arguments(f"part.{name}", spec):
                attention.add_part(name, part)


def shared_arguments(model: ModelConfig, block: BlockConfig) -> dict[str, Any]:
    """Return the arguments that an attention gets, beside its YAML's keys, if it declares them.

    It can also declare `position`, a HeadPosition or None, and `layer`, counted from 0.
    """
    groups = {"model": model, "block": block}
    names = {argument: setting.split(".") for argument, setting in FILLED_BY.items()}
    return {argument: getattr(groups[group], name) for argument, (group, name) in names.items()}


def name_position(cfg: TrainConfig) -> str:
    """Return the name of the encoding and of the block, which may have brought it."""
    return f"{cfg.choices['position']} (from block={cfg.choices['block']} if you did not choose it)"
