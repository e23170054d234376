"""Match two variants in parameters, FLOPs or cache by changing one setting of one of them.

`params` and `flops` change the MLP's width; `kv_cache` the heads, ranks or tokens that are cached.
Costs come from `measure_cost` on the meta device: there is no second formula.
"""

import contextlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch

from gptattn.errors import ConfigError
from gptattn.model.cost import Cost, measure_cost
from gptattn.settings.build import build_model, width_of_mlp
from gptattn.settings.config import TrainConfig

TOLERANCE = 1e-3  # relative
FIGURES: dict[str, Callable[[Cost], float]] = {
    "params": lambda cost: cost.params,
    "flops": lambda cost: cost.flops_per_token,
    "kv_cache": lambda cost: cost.kv_bytes_per_token,
}


@dataclass(frozen=True)
class Match:
    """The change of `field` that makes `what` (params, flops, kv_cache) equal to variant `to`'s.

    `target` and `reached` are the costs of `to` and of the changed variant, in the units of `Cost`.
    """

    what: str
    to: str
    field: str
    before: float | None
    after: float | None
    target: float
    reached: float

    def __str__(self) -> str:
        change = f"{self.field} {self.before} -> {self.after}"
        if self.before == self.after:
            change = f"{self.field} stays {self.after}" if self.after else "nothing changes"
        apart = abs(self.reached - self.target) / self.target
        figures = f"{self.reached:,.0f} against {self.target:,.0f} of {self.to}"
        return f"match={self.what}: {change}; {figures} ({apart:.2%} apart)"


def matched(cfg: TrainConfig, vocab_size: int) -> tuple[TrainConfig, Match | None]:
    """Return the settings with the match applied, and the match; None if `cfg.match` is none.

    Settings that are matched already, those in a run's record, stay as they are. Raises
    ConfigError if the variant cannot be matched, naming the matches that are possible.
    """
    if cfg.match == "none":
        return cfg, None
    if cfg.match_made is not None:
        return cfg, Match(**cfg.match_made)
    assert cfg.match_attn is not None
    plain = {"pattern": None, "part": {}, "match": "none"}
    choices = cfg.choices | {"attn": cfg.match_to}
    reference = _cost(replace(cfg, attn=cfg.match_attn, choices=choices, **plain), vocab_size)
    try:
        new, match = _match_one(cfg, reference, vocab_size)
    except ConfigError as error:
        able = []
        for what in FIGURES:
            with contextlib.suppress(ConfigError):
                _match_one(replace(cfg, match=what), reference, vocab_size)
                able.append(f"match={what}")
        other = f"{' or '.join(able)} is possible" if able else "nothing else can be matched"
        raise ConfigError("match", f"{error.message}; {other}") from None
    return replace(new, match_made=asdict(match)), match


def _match_one(cfg: TrainConfig, reference: Cost, vocab_size: int) -> tuple[TrainConfig, Match]:
    target = FIGURES[cfg.match](reference)
    if cfg.match == "kv_cache":
        return _match_cache(cfg, vocab_size, target)

    def at(d_mlp: int) -> tuple[TrainConfig, float]:
        new = replace(cfg, model=replace(cfg.model, d_mlp=d_mlp))
        return new, FIGURES[cfg.match](_cost(new, vocab_size))

    # Parameters and FLOPs are linear in the width: two points give the line.
    (_, one), (_, two) = at(1), at(2)
    width = max(1, round(1 + (target - one) / (two - one)))
    new, reached = at(width)
    if abs(reached - target) > TOLERANCE * target:
        raise ConfigError(
            "match",
            f"no width of the MLP brings {cfg.variant}'s {cfg.match} within {TOLERANCE:.1%} of "
            f"{cfg.match_to}'s {target:,.0f}; the nearest, d_mlp={width}, gives "
            f"{reached:,.0f}, and a larger model would come nearer",
        )
    before = width_of_mlp(cfg.model)
    return new, Match(cfg.match, cfg.match_to, "model.d_mlp", before, width, target, reached)


def _cost(cfg: TrainConfig, vocab_size: int) -> Cost:
    with torch.device("meta"):
        return measure_cost(build_model(cfg, vocab_size))


def _match_cache(cfg: TrainConfig, vocab_size: int, target: float) -> tuple[TrainConfig, Match]:
    """Try the values of one setting after the other, starting with its current one."""
    heads, width, context = cfg.model.num_heads, cfg.model.d_model, cfg.model.context_length
    # The largest value, and the step: building a model takes its time, and shares of the width do.
    ranges = {
        "num_kv_heads": (heads, 1),
        "kv_rank": (width, 8),
        "key_rank": (heads, 1),
        "window": (context, 1),
    }
    near = []
    for field, (most, step) in ranges.items():
        before = cfg.attn.get(field)
        if field == "num_kv_heads" and field in cfg.attn and before is None:
            before = heads
        if before is None:  # a window that is null stays so: one would make another mechanism
            continue
        tried = []
        for value in [before, *(n for n in range(step, most + 1, step) if n != before)]:
            new = replace(cfg, attn=cfg.attn | {field: value})
            try:
                reached = FIGURES["kv_cache"](_cost(new, vocab_size))
            except ConfigError:
                continue  # this model does not accept the value
            if reached == target:
                name = f"attn.{field}"
                return new, Match("kv_cache", cfg.match_to, name, before, value, target, reached)
            tried.append((reached, value))
        below = [max(less)] if (less := [pair for pair in tried if pair[0] < target]) else []
        above = [min(more)] if (more := [pair for pair in tried if pair[0] > target]) else []
        near += [f"{reached:,.0f} with {field}={value}" for reached, value in below + above]
    if FIGURES["kv_cache"](_cost(cfg, vocab_size)) == target:
        return cfg, Match("kv_cache", cfg.match_to, "nothing", None, None, target, target)
    whose = "it" if cfg.pattern is None else "a pattern as a whole"
    none = f"{whose} has none of num_kv_heads, kv_rank, key_rank and window"
    reach = f"changing one setting at a time, it can have {', '.join(near)}" if near else none
    raise ConfigError(
        "match",
        f"{cfg.variant} cannot have the {target:,.0f} cache bytes per token of {cfg.match_to}: "
        f"{reach}",
    )
