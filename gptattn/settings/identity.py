"""What determines a run's result: its settings, code, text, starting weights and device.

Only this module says which settings change the result. The run's name, the search for finished
runs, resume, and the report's check that two runs may be compared all use it.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from gptattn.machine.source_code import code_of
from gptattn.settings.config import TrainConfig

UNTIL = "until step"  # key in `Making.earlier`: the last step that this part of the run took


# What another value of a setting means for a run.
RESULT = "another result"
SEED = "another result, but a run's name has its own place for it"
LENGTH = "another result, but a resumed run may have it"
PLACE = "what counts is the content at this path"
VIEW = "shown, or computed, in another way: the result is the same"
# Also what is filled in for the record, and what config groups and the command's own words select.
BOUND = "the result is the same, but it is fixed once the run has begun"

RESUMES = (LENGTH, PLACE, VIEW)  # may change when a run is resumed
NAMED = (RESULT, LENGTH, PLACE)  # an override is part of the run's name

# The first pattern that matches a setting's name counts. All other settings are RESULT.
MEANINGS = {
    r"seed": SEED,
    r"budget(\..+)?": LENGTH,
    r"data\.(sources\.[^.]+\.)?(val_)?path|tokenizer\.path": PLACE,
    (
        r"validation\.count|model\.recompute|log_every|log_heads|hang_seconds|cache_dir"
        r"|trainer\.(devices|num_nodes)|(sample|sweep|ladder|logger)(\..+)?"
    ): VIEW,
    (
        r"init_from|trainer|trainer\.(accelerator|threads|deterministic|auto_precision)"
        r"|experiment_name|checkpoint|allow_targets(\[.*)?|(choices|match_(attn|before|made))(\..+)?"
        # A run's name begins with attn, pattern and part.
        r"|attn|pattern|part|experiment|launcher|resume|run_dir|hydra([./].+)?"
    ): BOUND,
}

# The settings that may change on resume, as shown to users.
MAY_CHANGE = (
    "budget, validation.count, model.recompute, log_every, log_heads, hang_seconds, cache_dir, "
    "sample, sweep, logger, trainer.devices, trainer.num_nodes, data.path, data.val_path, "
    "tokenizer.path"
)


@lru_cache(maxsize=4096)  # every run of a sweep asks for the same keys again
def meaning(key: str) -> str:
    """Return the meaning of a setting by its dotted name, or of a config group by its name."""
    found = (one for pattern, one in MEANINGS.items() if re.fullmatch(pattern, key))
    return next(found, RESULT)


def flat(node: Any, name: str = "") -> dict[str, str]:
    """Return nested settings as a flat dict of strings: `{"a.b": "1", "c[0]": "x"}`."""
    if isinstance(node, dict) and node:
        dot = f"{name}." if name else ""
        below = [flat(value, f"{dot}{key}") for key, value in node.items()]
    elif isinstance(node, list) and node:
        below = [flat(value, f"{name}[{i}]") for i, value in enumerate(node)]
    else:
        return {name: str(node)}
    return {key: value for one in below for key, value in one.items()}


def result_settings(config: Mapping[str, str]) -> dict[str, str]:
    """Select from a config's flat settings those that change the result, except the seed.

    The budget is given in words, so that 1,000 requested steps equal 1,000 default steps.
    """
    kept = {key: value for key, value in config.items() if meaning(key) is RESULT}
    return kept | {"budget": budget_words(config)}


def places(config: Mapping[str, str]) -> dict[str, str]:
    """Select from a config's flat settings the paths of text, tokenizer and starting weights."""
    return {k: v for k, v in config.items() if meaning(k) is PLACE or k == "init_from"}


def budget_words(config: Mapping[str, str]) -> str:
    """Return the budget in words, such as `1000 steps`; the default counts only without another."""
    given = {k.removeprefix("budget."): v for k, v in config.items() if k.startswith("budget.")}
    default = given.pop("default_steps", None)
    set_ = [f"{value} {unit}" for unit, value in sorted(given.items()) if value != "None"]
    return " and ".join(set_) or (f"{default} steps" if default else "")


def settings_key(settings: Mapping[str, Any]) -> str:
    """Return a string that is equal for settings that make the same run.

    `settings` are nested, as in config.yaml.
    """
    config = flat(dict(settings))
    parts = settings.get("part")
    own = {
        "attn": config.get("choices.attn"),
        # Parts act in their order, which `config` does not show.
        "parts": list(parts) if isinstance(parts, dict) else [],
        "seed": config["seed"],
    }
    # Only whether there are starting weights: `Making.weights` identifies them by content.
    starts = config.get("init_from", "None") != "None"
    return json.dumps(result_settings(config) | own | {"starts": starts}, sort_keys=True)


@dataclass(frozen=True)
class Making:
    """What a run's result depends on beside its settings; written to identity.json."""

    text: str  # sha256
    device: str
    code: dict[str, str]  # module -> hash, of code that affects the numbers
    weights: str | None = None  # sha256 of the weights in init_from, before conversion
    origin: str = ""  # `digest` of the run in init_from, if known
    # Code or schedule of earlier steps, if the run was resumed with other code or in mid-schedule.
    earlier: list[dict[str, str]] = field(default_factory=list)

    @property
    def digest(self) -> str:
        """Eight hex digits that identify the run's code and that behind its starting weights."""
        code = json.dumps([self.code, self.earlier, self.origin], sort_keys=True)
        return hashlib.sha256(code.encode()).hexdigest()[:8]


def code_for(cfg: TrainConfig) -> dict[str, str]:
    """Return module -> hash for the code that affects the numbers of a run of these settings.

    Files are hashed at the first call and then cached. Call it before reading the text, which can
    take minutes: a file edited meanwhile would no longer be the code that this process imported.
    """
    # Of tokenizers and data sources, only modules outside gptattn are hashed. For ours, the hash of
    # the text has to do.
    sources = cfg.data.get("sources")
    texts = sources.values() if isinstance(sources, dict) else ()
    layers = (cfg.pattern_attn or {"attn": cfg.attn}).values()
    groups = (*layers, *cfg.part.values(), cfg.position, cfg.tokenizer, cfg.data, *texts)
    specs = (*groups, cfg.optim.matrices or {})
    targets = [str(spec["_target_"]) for spec in specs if "_target_" in spec]
    if cfg.init_from is not None:
        targets.append("gptattn.weights.init_from")
    return code_of(targets, cfg.allow_targets)


def differences(was: Making | None, now: Making) -> list[str]:
    """List in words how a run's Making differs from `now`; empty if the result would be equal."""
    if was is None:
        return ["its code is unknown"]
    found = [f"code of {', '.join(changed(was.code, now.code))}"] if was.code != now.code else []
    if was.earlier != now.earlier:
        found.append("it was resumed with other code or another schedule")
    if was.origin != now.origin:
        found.append("other code made the weights in init_from")
    if was.text != now.text:
        found.append("another text")
    if was.weights != now.weights:
        found.append("other weights in init_from")
    if was.device != now.device:
        found.append(f"on {was.device}, not {now.device}")
    return found


def changed(was: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the modules whose hashes differ or that only one side has, sorted."""
    return sorted(name for name in was.keys() | now.keys() if was.get(name) != now.get(name))


def went_on(was: Making | None, now: Making, step: int, schedule: str = "") -> Making:
    """Return the Making of a run that began with `was` and resumes after `step` with `now`.

    `schedule`: the budget, in words, whose schedule the run leaves unfinished; "" if it keeps its
    schedule or has completed it.
    """
    if was is None:
        return replace(now, earlier=[{UNTIL: str(step)}])
    left = [{**was.code, UNTIL: str(step)}] if was.code != now.code else []
    left += [{"schedule": schedule}] if schedule else []
    return replace(now, weights=was.weights, origin=was.origin, earlier=[*was.earlier, *left])


def at_step(making: Making, step: int) -> Making:
    """Return the Making as it was at this step, before any later resume."""
    for i, part in enumerate(making.earlier):
        if UNTIL in part and int(part[UNTIL]) >= step:
            code = {name: value for name, value in part.items() if name != UNTIL}
            return replace(making, code=code, earlier=making.earlier[:i])
    return making
