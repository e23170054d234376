"""Matches a variant to another in parameters or FLOPs by changing the width of its MLP.

Costs come from `measure_cost` on the meta device.
"""

from dataclasses import replace

import torch

from gptattn.build.model import build_model, choose_mlp_width
from gptattn.errors import ConfigError
from gptattn.model.cost import measure_cost
from gptattn.settings.config import Spec, TrainConfig

TOLERANCE = 1e-2  # relative
FIGURES = {"params": "params", "flops": "flops_per_token"}


def apply_match(cfg: TrainConfig, vocab_size: int) -> TrainConfig:
    """Return the settings with `cfg.match`, which is not `none`, applied and set as `match_made`.

    Settings from a run's record are matched already and don't change. Raises ConfigError if the
    variant cannot be matched.
    """
    if cfg.match_made is not None:
        return cfg
    assert cfg.match_attn is not None
    without = {"pattern": None, "layers": {}, "part": {}, "match": "none"}
    choices = cfg.choices | {"attn": cfg.match_to}
    reference = replace(cfg, attn=cfg.match_attn, choices=choices, **without)
    target = _measure_figure(cfg, reference, vocab_size)
    new = _match_width(cfg, vocab_size, target)
    record = {
        "what": cfg.match,
        "to": cfg.match_to,
        "field": "model.d_mlp",
        "before": choose_mlp_width(cfg.model),
        "after": new.model.d_mlp,
        "target": target,
        "reached": _measure_figure(cfg, new, vocab_size),
    }
    return replace(new, match_made=record)


def describe_match(record: Spec) -> str:
    """Return a line for a run's `match_made`: what changed, and how close the costs are now."""
    field, before, after = record["field"], record["before"], record["after"]
    change = f"{field} {before} -> {after}"
    if before == after:
        change = f"{field} stays {after}"
    apart = abs(record["reached"] - record["target"]) / record["target"]
    figures = f"{record['reached']:,.0f} against {record['to']}'s {record['target']:,.0f}"
    return f"match={record['what']}: {change}; {figures} ({apart:.2%} apart)"


def _measure_figure(cfg: TrainConfig, of: TrainConfig, vocab_size: int) -> float:
    """Return the cost that `cfg` matches, of the model built from the settings `of`."""
    with torch.device("meta"):
        return getattr(measure_cost(build_model(of, vocab_size)), FIGURES[cfg.match])


def _match_width(cfg: TrainConfig, vocab_size: int, target: float) -> TrainConfig:
    """Return the settings with the MLP width that comes nearest.

    Parameters and FLOPs are linear in the width, so two points give the line.
    """

    def at(width: int) -> TrainConfig:
        return replace(cfg, model=replace(cfg.model, d_mlp=width))

    one, two = (_measure_figure(cfg, at(width), vocab_size) for width in (1, 2))
    width = max(1, round(1 + (target - one) / (two - one)))
    reached = one + (width - 1) * (two - one)
    if abs(reached - target) > TOLERANCE * target:
        raise ConfigError(
            "match",
            f"no MLP width brings {cfg.variant}'s {cfg.match} within {TOLERANCE:.0%} of "
            f"{cfg.match_to}'s {target:,.0f} (the nearest, d_mlp={width}, gives "
            f"{reached:,.0f}); use a larger model, which comes nearer",
        )
    return at(width)
