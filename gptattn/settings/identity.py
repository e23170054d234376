"""What makes a run's result: its settings, and beside them code, text, weights and device.

The one place that says of every setting what it means for that. A run's name, "done already",
resume, and whether the report may compare two runs, all ask here.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gptattn.machine.source_code import code_of, other_code
from gptattn.settings.config import TrainConfig

UNTIL = "until step"  # in an earlier part of a making: the last step that it took
NODES, DEPTH = 5_000, 20  # a few bytes of YAML with aliases can stand for any number of values


@dataclass(frozen=True)
class Meaning:
    """What a setting means for the run that has it."""

    result: bool  # another value makes another result
    resumes: bool  # it may change when the run goes on
    named: bool  # it stands in the run's name, where it was given


RESULT = Meaning(result=True, resumes=False, named=True)
LENGTH = Meaning(result=True, resumes=True, named=True)
# It makes another result, and a name has a place of its own for it.
SEED = Meaning(result=True, resumes=False, named=False)
# What is shown, how often, and how a machine is used: the numbers stay.
VIEW = Meaning(result=False, resumes=True, named=False)
# Where something lies: what lies there counts, by its content.
PLACE = Meaning(result=False, resumes=True, named=True)
# Likewise, but what has begun has read it, or is bound to it.
BOUND = Meaning(result=False, resumes=False, named=False)
# Filled in for the record, out of what else is said.
RECORD = BOUND

# The first that matches; a setting that is not here makes another result.
MEANINGS: tuple[tuple[str, Meaning], ...] = (
    (r"seed", SEED),
    (r"budget(\..+)?", LENGTH),
    (r"validation\.count|log_every|log_heads|hang_seconds|cache_dir|(sample|sweep)(\..+)?", VIEW),
    (r"data\.(val_)?path|tokenizer\.path", PLACE),
    (r"init_from|trainer|trainer\.(accelerator|threads)", BOUND),
    (r"experiment_name|checkpoint|allow_targets(\[.*)?", BOUND),
    (r"choices(\..+)?|match_(attn|before)(\..+)?", RECORD),
    # Groups and words of a command; what they choose is in the settings.
    (r"attn|experiment|launcher|resume|hydra([./].+)?", BOUND),
)


# The settings that may change when a run goes on, for people.
MAY_CHANGE = (
    "budget, validation.count, log_every, log_heads, hang_seconds, cache_dir, sample, sweep, "
    "data.path, data.val_path, tokenizer.path"
)


def meaning(key: str) -> Meaning:
    """Of a setting by its dotted name, or of a group by its own."""
    for pattern, found in MEANINGS:
        if re.fullmatch(pattern, key):
            return found
    return RESULT


def flat(node: Any, prefix: str = "") -> dict[str, str]:
    """`{"a.b": "1", "c[0]": "x"}`. Raises ValueError for what is too large or too deep."""
    values: dict[str, str] = {}
    waiting, count = [(prefix, node, 0)], 0
    while waiting:
        name, value, depth = waiting.pop()
        count += 1
        if count > NODES or depth > DEPTH:
            raise ValueError("too many settings, or too deeply nested ones")
        if isinstance(value, dict) and value:
            dot = f"{name}." if name else ""
            waiting.extend((f"{dot}{k}", v, depth + 1) for k, v in value.items())
        elif isinstance(value, list) and value:
            waiting.extend((f"{name}[{i}]", v, depth + 1) for i, v in enumerate(value))
        else:
            values[name] = str(value)
    return values


def result_settings(config: Mapping[str, str]) -> dict[str, str]:
    """Of a config's flat settings those that make another result, all but the seed.

    The budget is one of them, in words: 1,000 steps are the same, asked for or by default.
    """
    kept = {k: v for k, v in config.items() if meaning(k) == RESULT}
    return kept | {"budget": budget_words(config)}


def places(config: Mapping[str, str]) -> dict[str, str]:
    """Of a config's flat settings those whose content counts: where it was said to lie."""
    return {k: v for k, v in config.items() if meaning(k) == PLACE or k == "init_from"}


def budget_words(config: Mapping[str, str]) -> str:
    """`1000 steps`. The default counts only where no other budget is given."""
    given = {k.removeprefix("budget."): v for k, v in config.items() if k.startswith("budget.")}
    default = given.pop("default_steps", None)
    set_ = [f"{value} {unit}" for unit, value in sorted(given.items()) if value != "None"]
    return " and ".join(set_) or (f"{default} steps" if default else "")


def settings_key(settings: Mapping[str, Any]) -> str:
    """Equal for settings that make the same run; `settings` are nested, as config.yaml has them."""
    config = flat(dict(settings))
    own = {"attn": config.get("choices.attn"), "seed": config["seed"]}
    # Whether weights are started from: which, their content says.
    starts = config.get("init_from", "None") != "None"
    return json.dumps(result_settings(config) | own | {"starts": starts}, sort_keys=True)


@dataclass(frozen=True)
class Making:
    """What made a run's numbers, beside its settings."""

    text: str  # sha256
    device: str
    code: dict[str, str]  # module -> hash; of the code that makes numbers
    weights: str | None = None  # sha256 of those in init_from, before they were converted
    origin: str = ""  # the digest of the run in init_from, where that has one
    other: dict[str, str] = field(default_factory=dict)  # module -> hash; of the rest of the code
    # What made its first steps, where it was resumed with another code or in mid-schedule.
    earlier: list[dict[str, str]] = field(default_factory=list)

    @property
    def digest(self) -> str:
        """Eight characters for the code alone, its own and that behind its starting weights."""
        code = json.dumps([self.code, self.earlier, self.origin], sort_keys=True)
        return hashlib.sha256(code.encode()).hexdigest()[:8]


def making_of(
    cfg: TrainConfig, text: str, device: str, weights: str | None, origin: Making | None
) -> Making:
    """What makes a run of these settings that starts now; `origin`: what made that in init_from."""
    code = code_for(cfg)
    other = other_code(code, cfg.allow_targets)
    return Making(text, device, code, weights, origin.digest if origin else "", other)


def code_for(cfg: TrainConfig) -> dict[str, str]:
    """Module -> hash of the code that makes the numbers of a run of these settings.

    As it was when this was first called: before a text is read, which can take minutes in which
    somebody goes on editing what this process has imported.
    """
    # What our own tokenizers and texts make of the data is told by the text's content.
    groups = (cfg.attn, cfg.position, cfg.tokenizer, cfg.data)
    targets = [str(spec["_target_"]) for spec in groups if "_target_" in spec]
    if cfg.init_from is not None:
        targets.append("gptattn.weights.convert")
    return code_of(targets, cfg.allow_targets)


def differences(was: Making | None, now: Making) -> list[str]:
    """What of a run's making is not as it would be now; empty: the result would be the same."""
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
    """The modules that are not the same in both."""
    return sorted(name for name in was.keys() | now.keys() if was.get(name) != now.get(name))


def went_on(was: Making | None, now: Making, step: int, schedule: str = "") -> Making:
    """The making of a run that began as `was` says, and goes on after `step` with `now`'s code.

    `schedule`: the one that it leaves before its end, in words; "": it stays with its own, or that
    was over.
    """
    if was is None:
        return replace(now, earlier=[{UNTIL: str(step)}])
    left = [{**was.code, UNTIL: str(step)}] if was.code != now.code else []
    left += [{"schedule": schedule}] if schedule else []
    return replace(now, weights=was.weights, origin=was.origin, earlier=[*was.earlier, *left])


def at_step(making: Making, step: int) -> Making:
    """What had made the run at this step, whatever came later."""
    for i, part in enumerate(making.earlier):
        if UNTIL in part and int(part[UNTIL]) >= step:
            code = {name: value for name, value in part.items() if name != UNTIL}
            return replace(making, code=code, earlier=making.earlier[:i])
    return making
