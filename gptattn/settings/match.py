"""Match two variants in parameters, FLOPs or cache by changing one setting of one of them.

`params` and `flops` change the MLP's width; `kv_cache` changes one of CACHE_SETTINGS. Costs come
from `measure_cost` on the meta device: there is no second formula.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from gptattn.data.tokenizer import Tokenizer
from gptattn.errors import ConfigError
from gptattn.model.cost import Cost, measure_cost
from gptattn.settings.build import build_model, width_of_mlp
from gptattn.settings.config import TrainConfig

TOLERANCE = 1e-3  # relative
CACHE_SETTINGS = ("num_kv_heads", "kv_rank", "key_rank", "window")
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


def resolved(cfg: TrainConfig, tokenizer: Tokenizer) -> tuple[TrainConfig, Match | None]:
    """Return the settings as config.yaml records them, and the match.

    The tokenizer's vocabulary is filled in and the match applied. Raises ConfigError as `matched`.
    """
    cfg = replace(cfg, tokenizer=cfg.tokenizer | tokenizer.settings())
    return matched(cfg, tokenizer.vocab_size)


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
    reference = replace(
        cfg,
        attn=cfg.match_attn,
        choices=cfg.choices | {"attn": cfg.match_to},
        pattern=None,
        part={},
        match="none",
    )
    try:
        new, match = _matched_once(cfg, reference, vocab_size)
        return replace(new, match_made=asdict(match)), match
    except ConfigError as error:
        able = [
            what
            for what in FIGURES
            if what != cfg.match and _can_match(cfg, what, reference, vocab_size)
        ]
        other = (
            f"match={' or match='.join(able)} is possible"
            if able
            else "nothing else can be matched"
        )
        raise ConfigError("match", f"{error.message}; {other}") from None


def _matched_once(
    cfg: TrainConfig, reference: TrainConfig, vocab_size: int
) -> tuple[TrainConfig, Match]:
    target = FIGURES[cfg.match](_cost(reference, vocab_size))
    if cfg.match == "kv_cache":
        return _match_cache(cfg, vocab_size, target)
    return _match_width(cfg, vocab_size, target)


def _can_match(cfg: TrainConfig, what: str, reference: TrainConfig, vocab_size: int) -> bool:
    try:
        _matched_once(replace(cfg, match=what), reference, vocab_size)
    except ConfigError:
        return False
    return True


def _cost(cfg: TrainConfig, vocab_size: int) -> Cost:
    with torch.device("meta"):
        return measure_cost(build_model(cfg, vocab_size))


def _with_width(cfg: TrainConfig, d_mlp: int) -> TrainConfig:
    return replace(cfg, model=replace(cfg.model, d_mlp=d_mlp))


def _match_width(cfg: TrainConfig, vocab_size: int, target: float) -> tuple[TrainConfig, Match]:
    figure = FIGURES[cfg.match]

    def at(d_mlp: int) -> float:
        return figure(_cost(_with_width(cfg, d_mlp), vocab_size))

    # Parameters and FLOPs are linear in the width: two points give the line.
    one, two = at(1), at(2)
    width = max(1, round(1 + (target - one) / (two - one)))
    reached = at(width)
    if abs(reached - target) > TOLERANCE * target:
        raise ConfigError(
            "match",
            f"no width of the MLP brings {cfg.variant}'s {cfg.match} within {TOLERANCE:.1%} of "
            f"{cfg.match_to}'s {target:,.0f}; the nearest, d_mlp={width}, gives "
            f"{reached:,.0f}, and a larger model would come nearer",
        )
    before = width_of_mlp(cfg.model)
    match = Match(cfg.match, cfg.match_to, "model.d_mlp", before, width, target, reached)
    return _with_width(cfg, width), match


def _match_cache(cfg: TrainConfig, vocab_size: int, target: float) -> tuple[TrainConfig, Match]:
    found: dict[str, list[tuple[float, float]]] = {}
    for field, before, value in _cache_settings(cfg):
        new = replace(cfg, attn=cfg.attn | {field: value})
        try:
            reached = FIGURES["kv_cache"](_cost(new, vocab_size))
        except ConfigError:
            continue  # this model does not accept the value
        if reached == target:
            name = f"attn.{field}"
            return new, Match("kv_cache", cfg.match_to, name, before, value, target, reached)
        found.setdefault(field, []).append((reached, value))
    if FIGURES["kv_cache"](_cost(cfg, vocab_size)) == target:
        return cfg, Match("kv_cache", cfg.match_to, "nothing", None, None, target, target)
    whose = "it" if cfg.pattern is None else "a pattern as a whole"
    none = f"{whose} has none of num_kv_heads, kv_rank, key_rank and window"
    near = ", ".join(_nearest(field, tried, target) for field, tried in found.items())
    reach = f"changing one setting at a time, it can have {near}" if found else none
    raise ConfigError(
        "match",
        f"{cfg.variant} cannot have the {target:,.0f} cache bytes per token of {cfg.match_to}: "
        f"{reach}",
    )


def _nearest(field: str, tried: Sequence[tuple[float, float]], target: float) -> str:
    """Return the nearest costs below and above the target: `96 with window=3, 160 with window=5`.

    `tried`: (cost, value of `field`) pairs, none of which has the target.
    """
    below = max((pair for pair in tried if pair[0] < target), default=None)
    above = min((pair for pair in tried if pair[0] > target), default=None)
    found = [pair for pair in (below, above) if pair is not None]
    return ", ".join(f"{reached:,.0f} with {field}={value}" for reached, value in found)


def _cache_settings(cfg: TrainConfig) -> Iterator[tuple[str, float, float]]:
    """Yield (setting, current value, value to try), starting with the current value.

    A window that is null stays so: one would make another mechanism. Key/value heads that are null
    are as many as query heads.
    """
    heads, width, context = cfg.model.num_heads, cfg.model.d_model, cfg.model.context_length
    most = (heads, width, heads, context)
    steps = (1, 8, 1, 1)  # kv_rank as shares of the width give it: building a model takes its time
    for field, step, top in zip(CACHE_SETTINGS, steps, most, strict=True):
        now = cfg.attn.get(field)
        if field == "num_kv_heads" and field in cfg.attn and now is None:
            now = cfg.model.num_heads
        if now is not None:
            values = [now, *(value for value in range(step, top + 1, step) if value != now)]
            yield from ((field, now, value) for value in values)
