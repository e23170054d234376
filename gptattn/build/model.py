"""Builds a run's model and its layers from the settings."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from gptattn.attention.base import Attention, Shared
from gptattn.attention.foreign import ForeignAttention
from gptattn.attention.parts.base import Part
from gptattn.attention.softmax import SoftmaxAttention
from gptattn.errors import ConfigError
from gptattn.machine.device import DTYPES, Toolchain, find_toolchain
from gptattn.model.gpt import GPT, BlockStyle
from gptattn.optim.matrix_rule import MatrixRule
from gptattn.position.base import Documents, HeadPosition, InputPosition
from gptattn.settings.compose import settings
from gptattn.settings.config import MASK_DOCUMENTS, ModelConfig, Spec, TrainConfig, default_width
from gptattn.settings.construct import (
    FILLED_BY,
    arguments_of,
    construct,
    find_target,
    named_arguments,
)
from gptattn.settings.layers import quote

# (settings of a position, number of heads) -> the encoding that layers with both share.
Encodings = dict[tuple[str, int], HeadPosition]


def build_model(cfg: TrainConfig, vocab_size: int) -> GPT:
    """Build the GPT of these settings, on torch's current default device.

    Raises ConfigError, naming the field, if it cannot be built.
    """
    model, block, given = cfg.model, cfg.block, cfg.model.vocab_size
    if given is not None and given < vocab_size:
        raise ConfigError(
            "model.vocab_size",
            f"{given} is below the data's {vocab_size:,} ids; give that many or more, or null",
        )
    kinds = cfg.kinds()
    chosen_parts = {name: spec for kind in kinds for name, spec in kind.part.items()}
    for name, spec in chosen_parts.items():
        if "_target_" not in spec:
            raise ConfigError(f"part.{name}", f"is set but not chosen; add part=[{name}]")
        target = find_target(f"part.{name}", spec, cfg.allow_targets)
        refuses = target.refuses if isinstance(target, type) and issubclass(target, Part) else {}
        for other in (*chosen_parts, f"position={cfg.choices['position']}"):
            reason = refuses.get(other.removeprefix("position="))
            if reason is not None:
                raise ConfigError("part", f"{name} cannot be used with {other}: {reason}")

    encodings: Encodings = {}
    in_heads = acts_in_heads(cfg.position, cfg.allow_targets)
    in_input = None
    if cfg.position and not in_heads:
        in_input = build_position(cfg, cfg.position, model.num_heads)
    built = GPT(
        vocab_size=given or vocab_size,
        context_length=model.context_length,
        d_model=model.d_model,
        num_layers=model.num_layers,
        attention=partial(build_layer, cfg, encodings, {}),
        input_position=in_input,
        d_mlp=choose_mlp_width(model),
        dropout=model.dropout,
        style=BlockStyle(block.norm, block.norm_eps, model.mlp, block.bias, block.zero_init),
        tied_head=block.tied_head,
        embedding_std=block.embedding_std,
        shared_init=cfg.shared_init,
        activation_checkpointing=model.activation_checkpointing,
    )

    chosen = f"attn={cfg.choices['attn']}" if cfg.pattern is None else "the pattern"
    if in_heads and all(position != repr(cfg.position) for position, _ in encodings):
        raise ConfigError(
            "position",
            f"{name_position(cfg)} acts on queries and keys, but {chosen} already encodes order; "
            "use position=none, position=learned or position=sinusoidal",
        )
    attentions = [one.attention for one in built.layers()]
    taken = [list_parts(attention) for attention in attentions]
    unused = [name for name in chosen_parts if not any(name in parts for parts in taken)]
    if unused:
        raise ConfigError(
            "part",
            f"{chosen} cannot take {', '.join(unused)}: parts are for softmax attention, most for "
            "one key and value per head; leave that out, or use another attention",
        )
    for layer, attention in enumerate(attentions):
        for module in attention.modules() if cfg.data.get(MASK_DOCUMENTS) else ():
            if isinstance(module, Attention | Part) and not module.keeps_documents:
                title = getattr(module, "title", type(module).__name__)
                raise ConfigError(
                    f"data.{MASK_DOCUMENTS}",
                    f"{title} in layer {layer} cannot keep documents apart; use another, or set "
                    f"data.{MASK_DOCUMENTS}=false",
                )
    bound = ((layer, one) for layer, one in enumerate(attentions) if not one.shares_freely)
    needed = {name for attention in attentions for name in attention.needs()}
    unread = [
        (layer, name) for layer, one in bound for name in one.provides() if name not in needed
    ]
    if unread:
        layer, name = unread[0]
        problem = f"layer {layer} provides {name}, but no later layer takes them"
        if cfg.pattern is None:
            raise ConfigError("model.num_layers", f"{problem}; give the model more layers")
        raise ConfigError("pattern", f"{problem}; add a layer after it that does")
    return built


def resolve_backends(
    cfg: TrainConfig, device: torch.device, tools: Toolchain | None = None
) -> tuple[TrainConfig, list[str]]:
    """Return the settings with a backend for each `auto` and, on a GPU, a line for each kind.

    A sweep's choices are kept. `tools` describes another machine. Raises as `build_model`.
    """
    if (sizes := cfg.match_attn or {}).get("backend") == "auto":  # it is only counted
        target = find_target("match_to", sizes, cfg.allow_targets)
        cfg = replace(cfg, match_attn=sizes | {"backend": getattr(target, "plain_backend", "auto")})
    # On a CPU, a kind without the setting stays as it is.
    default = "auto" if device.type == "cuda" else ""
    automatic = [kind for kind in cfg.kinds() if kind.attn.get("backend", default) == "auto"]
    targets = {kind.field: find_target(*kind[:2], cfg.allow_targets) for kind in automatic}
    # A user's own mechanism may not have this argument.
    targets = {k: one for k, one in targets.items() if "backend" in arguments_of(one).types}
    plain = {field: getattr(target, "plain_backend", "") for field, target in targets.items()}
    chosen, notes = {field: name for field, name in plain.items() if name}, dict[str, None]()
    if not chosen or not default:
        return cfg.with_backends(chosen), []
    T, dtype = cfg.model.context_length, DTYPES[cfg.trainer.precision]
    tools = tools or find_toolchain(device)
    fields = [kind.field for kind in cfg.kinds()]
    by_sweep = dict(zip(fields, cfg.sweep.backends or (), strict=False))
    try:
        with torch.device("meta"):
            x_BTE, number_BT = torch.zeros(1, T, cfg.model.d_model), torch.zeros(1, T)
            apart = cfg.data.get(MASK_DOCUMENTS)
            shared = Shared(Documents.numbered(number_BT) if apart else range(T), masks={})
            for layer, block in enumerate(build_model(cfg, vocab_size=1).layers()):
                name, why = block.attention.choose_backend(x_BTE, shared, dtype, tools)
                if (field := cfg.layer(layer).field) in chosen:
                    chosen[field] = by_sweep.get(field, name)
                    why = why if chosen[field] == name else "as the sweep chose"
                    notes[f"{field}.backend={chosen[field]}" + f": {why}" * bool(why)] = None
    except RuntimeError:
        notes["backend: unchanged, because a layer cannot be built on the meta device"] = None
    return cfg.with_backends(chosen), [*notes]


def build_layers(
    *overrides: str,
    d_model: int,
    num_heads: int,
    num_layers: int,
    context_length: int,
    recipe: str | None = None,
    attn: str | None = None,
) -> nn.ModuleList:
    """Build the attention layers of a recipe, or of an attention, for your own training loop.

    Each is an `Attention`, x [B, T, d_model] -> y [B, T, d_model], with its positions and parts,
    initialised as in a run. You add norms, residuals and MLPs, and any positions that act on
    embeddings: recipe=gpt2 has these, and so has attn= with its default, learned. `overrides` are
    train.py's, such as "attn.window=32"; without `recipe` and `attn`, they choose the layers.

    Layers that share state (cross_layer, rwkv7, value_residual) need one `Shared` per forward pass,
    the same for all layers: `layer(x, cache, shared)` with `shared = Shared(range(T))`, or, with
    caches in a `CacheGroup`, `Shared(caches.next_positions(T))`. Other layers accept it too.

    Raises ConfigError, with train.py's message.
    """
    sizes = {
        "d_model": d_model,
        "num_heads": num_heads,
        "num_layers": num_layers,
        "context_length": context_length,
    }
    named = {"recipe": recipe, "attn": attn}
    cfg = settings(
        [
            *(f"{group}={quote(name)}" for group, name in named.items() if name is not None),
            *(f"model.{name}={size}" for name, size in sizes.items()),
            "model.mlp=none",  # MLPs are not used
            *overrides,
        ]
    )
    return nn.ModuleList(block.attention for block in build_model(cfg, vocab_size=1).layers())


def describe_missing_parts(cfg: TrainConfig, model: GPT) -> list[str]:
    """Return a line for each chosen part that some kinds of layers cannot take."""
    lines = []
    kinds = dict.fromkeys(cfg.pattern or ())  # without a pattern, such a part is refused
    layers = [*zip(cycle(cfg.pattern or ()), model.layers(), strict=False)]
    for name in cfg.part:
        has = {kind for kind, block in layers if name in list_parts(block.attention)}
        if without := ", ".join(kind for kind in kinds if kind not in has):
            lines.append(f"part={name}: left out of {without}, which cannot take it")
    return lines


def list_parts(attention: nn.Module) -> set[str]:
    """Return the names of the parts in this attention."""
    named = attention.named_modules()
    return {path.rpartition(".")[2] for path, module in named if isinstance(module, Part)}


def build_layer(
    cfg: TrainConfig, encodings: Encodings, provided: dict[str, tuple[int, str]], layer: int
) -> Attention:
    """Build the attention of one layer, with its position and the parts that it takes.

    This adds to `encodings`, the positions of earlier layers, and to `provided`, which maps a name
    that they share with later ones to its layer and sizes.
    """
    group, spec, parts, chosen = cfg.layer(layer)
    for name in ("d_in", "d_out", "context_length"):
        if name in spec:
            raise ConfigError(
                f"{group}.{name}", f"comes from the model; set {FILLED_BY[name]} instead"
            )
    target = find_target(group, spec, cfg.allow_targets)
    ordered = getattr(target, "knows_order", False)
    position = None
    if acts_in_heads(chosen, cfg.allow_targets) and not ordered:
        takes = arguments_of(target).types
        if "position" not in takes:
            raise ConfigError(
                "position",
                f"{name_position(cfg)} acts in the attention, but {target.__name__} takes no "
                "position; use position=learned, position=sinusoidal or position=none",
            )
        heads = spec.get("num_heads", cfg.model.num_heads) if "num_heads" in takes else 1
        if type(heads) is not int or heads < 1:
            raise ConfigError(f"{group}.num_heads", f"{heads!r} is not a positive whole number")
        kind = repr(chosen), heads
        if kind not in encodings:
            encodings[kind] = build_position(cfg, chosen, heads)
        position = encodings[kind]
    shared = shared_arguments(cfg) | {"position": position, "layer": layer}
    shared["provided"] = frozenset(provided)
    module = construct(group, spec, shared, cfg.allow_targets, nn.Module)
    sizes = cfg.model.d_model, cfg.model.d_model, cfg.model.context_length
    if not isinstance(module, Attention) and position is not None and position.decays:
        raise ConfigError(
            "position",
            f"{name_position(cfg)} acts on scores, which {target.__name__} does not expose; use "
            "position=rope, position=learned, position=sinusoidal or position=none",
        )
    attention = module if isinstance(module, Attention) else ForeignAttention(module, *sizes)
    add_parts(attention, parts, layer, cfg.allow_targets, provided)
    # A variant can check an argument as late as in `rule()`, which making a cache calls.
    with named_arguments(group, spec):
        attention.new_cache(1, 1)
    for name, sizes in attention.needs().items():
        source, available = provided.get(name, (None, ""))
        if available != sizes:
            lack = f"layer {source} provides others ({available}); use the same in both layers"
            if source is None:
                lack = "no earlier layer provides them; add a layer before it that does"
            field = group.partition(".")[0]
            raise ConfigError(field, f"layer {layer} needs {name} ({sizes}), but {lack}")
    provided.update({name: (layer, sizes) for name, sizes in attention.provides().items()})
    return attention


def acts_in_heads(position: Spec, allow_targets: Sequence[str]) -> bool:
    """Return whether this position encoding, if any, acts in each attention."""
    if not position:
        return False
    kind = find_target("position", position, allow_targets)
    if not (isinstance(kind, type) and issubclass(kind, HeadPosition | InputPosition)):
        raise ConfigError("position._target_", "must subclass HeadPosition or InputPosition")
    return issubclass(kind, HeadPosition)


def build_position(cfg: TrainConfig, position: Spec, heads: int) -> Any:
    """Build a position encoding, for `heads` heads if it acts in attentions."""
    shared = {
        "context_length": cfg.model.context_length,
        "d_model": cfg.model.d_model,
        "num_heads": heads,
        "head_dim": cfg.model.d_model // heads,
    }
    return construct("position", position, shared, cfg.allow_targets)


def add_parts(
    attention: Attention,
    parts: Mapping[str, Spec],
    layer: int,
    allow_targets: Sequence[str] = (),
    provided: Collection[str] = (),
) -> None:
    """Build the parts for this attention's sizes, and add those that it takes, in this order.

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
        if attention.takes(part):
            with named_arguments(f"part.{name}", spec):
                attention.add_part(name, part)


def shared_arguments(cfg: TrainConfig) -> dict[str, Any]:
    """Return the arguments that an attention gets, besides its YAML's keys, if it declares them.

    It can also declare `position`, a HeadPosition or None, `layer`, counted from 0, and `provided`,
    the names of what earlier layers share.
    """
    return {argument: attrgetter(setting)(cfg) for argument, setting in FILLED_BY.items()}


def name_position(cfg: TrainConfig) -> str:
    """Return the encoding's name, and the block's, which may have set it."""
    return f"{cfg.choices['position']} (from block={cfg.choices['block']} if you did not choose it)"


def build_matrix_rule(cfg: TrainConfig) -> MatrixRule | None:
    """Build the rule that updates the layers' matrices in place of AdamW; None without one.

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
