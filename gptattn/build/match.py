"""Match two variants in parameters, FLOPs or cache by changing one setting of one of them.

`params` and `flops` change the MLP's width; `kv_cache` the heads, ranks or tokens that are cached.
Costs come from `measure_cost` on the meta device, never from a second formula.
"""

from dataclasses import replace

import torch

from gptattn.build.model import build_model, choose_mlp_width
from gptattn.errors import ConfigError
from gptattn.model.cost import measure_cost
from gptattn.settings.config import Spec, TrainConfig

TOLERANCE = 1e-2  # relative
FIGURES = {"params": "params", "flops": "flops_per_token", "kv_cache": "kv_bytes_per_token"}
# The new settings, the name of the one that has changed, and its values before and after.
Change = tuple[TrainConfig, str, float | None, float | None]


def apply_match(cfg: TrainConfig, vocab_size: int) -> TrainConfig:
    """Return the settings with `cfg.match` applied, which is not `none`, and with `match_made`.

    Settings that are matched already, those in a run's record, stay as they are. Raises
    ConfigError if the variant cannot be matched.
    """
    if cfg.match_made is not None:
        return cfg
    assert cfg.match_attn is not None
    plain = {"pattern": None, "layers": {}, "part": {}, "match": "none"}
    choices = cfg.choices | {"attn": cfg.match_to}
    reference = replace(cfg, attn=cfg.match_attn, choices=choices, **plain)
    target = _measure_figure(cfg, reference, vocab_size)
    find = _match_cache if cfg.match == "kv_cache" else _match_width
    new, field, before, after = find(cfg, vocab_size, target)
    made = {
        "what": cfg.match,
        "to": cfg.match_to,
        "field": field,
        "before": before,
        "after": after,
        "target": target,
        "reached": _measure_figure(cfg, new, vocab_size),
    }
    return replace(new, match_made=made)


def describe_match(made: Spec) -> str:
    """Return a line for a run's `match_made`: what was changed, and how near the costs are now."""
    field, before, after = made["field"], made["before"], made["after"]
    change = f"{field} {before} -> {after}"
    if before == after:
        change = f"{field} stays {after}" if after else "nothing changes"
    apart = abs(made["reached"] - made["target"]) / made["target"]
    figures = f"{made['reached']:,.0f} against {made['target']:,.0f} of {made['to']}"
    return f"match={made['what']}: {change}; {figures} ({apart:.2%} apart)"


def _measure_figure(cfg: TrainConfig, of: TrainConfig, vocab_size: int) -> float:
    """Return the figure that `cfg` matches, of the model of the settings `of`."""
    with torch.device("meta"):
        figure = getattr(measure_cost(build_model(of, vocab_size)), FIGURES[cfg.match])
    if figure is None:
        raise ConfigError("match", f"{of.variant} has no cache that could be matched")
    return figure


def _match_width(cfg: TrainConfig, vocab_size: int, target: float) -> Change:
    """Find the MLP's width. Parameters and FLOPs are linear in it: two points give the line."""

    def at(width: int) -> TrainConfig:
        return replace(cfg, model=replace(cfg.model, d_mlp=width))

    one, two = (_measure_figure(cfg, at(width), vocab_size) for width in (1, 2))
    width = max(1, round(1 + (target - one) / (two - one)))
    reached = one + (width - 1) * (two - one)
    if abs(reached - target) > TOLERANCE * target:
        raise ConfigError(
            "match",
            f"no width of the MLP brings {cfg.variant}'s {cfg.match} within {TOLERANCE:.0%} of "
            f"{cfg.match_to}'s {target:,.0f}; the nearest, d_mlp={width}, gives "
            f"{reached:,.0f}, and a larger model would come nearer",
        )
    return at(width), "model.d_mlp", choose_mlp_width(cfg.model), width


def _match_cache(cfg: TrainConfig, vocab_size: int, target: float) -> Change:
    """Try one setting after another, each from its current value."""
    heads, width, context = cfg.model.num_heads, cfg.model.d_model, cfg.model.context_length
    # The largest value and the step, coarse for ranks since each try builds a model.
    ranges = {
        "num_kv_heads": (heads, 1),
        "kv_rank": (width, 8),
        "key_rank": (heads, 1),
        "window": (context, 1),
    }
    own = _measure_figure(cfg, cfg, vocab_size)
    if own == target:
        return cfg, "nothing", None, None
    reached = {own: f"{own:,.0f} as it is"}
    for field, (most, step) in ranges.items():
        before = cfg.attn.get(field)
        if field == "num_kv_heads" and field in cfg.attn and before is None:
            before = heads
        if before is None:  # a window that is null stays so: one would make another mechanism
            continue
        for value in range(step, most + 1, step):
            new = replace(cfg, attn=cfg.attn | {field: value})
            try:
                found = _measure_figure(cfg, new, vocab_size)
            except ConfigError:
                continue  # not valid for this model
            if found == target:
                return new, f"attn.{field}", before, value
            reached.setdefault(found, f"{found:,.0f} with {field}={value}")
    near = sorted(reached, key=lambda found: abs(found - target))[:2]
    raise ConfigError(
        "match",
        f"{cfg.variant} cannot have the {target:,.0f} cache bytes per token of {cfg.match_to}; "
        f"nearest: {' and '.join(reached[found] for found in near)}",
    )
