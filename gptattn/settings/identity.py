"""What determines a run's result: its settings, code, text, starting weights and device.

Run names, the search for finished runs, resuming and reports use it. Runs that differ in it are
never averaged (`compare/rows.py`).
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Any

from gptattn.machine.source_code import hash_code, hash_of
from gptattn.settings.config import Effect, TrainConfig
from gptattn.settings.values import bare, list_hints

# Keys in `Provenance.earlier`: the last step taken by other code, and an earlier budget in words.
UNTIL, BUDGET = "until step", "earlier budget"

RESUMES = (Effect.LENGTH, Effect.PLACE, Effect.VIEW)  # may change when a run is resumed
NAMED = (Effect.RESULT, Effect.LENGTH, Effect.PLACE)  # an override is part of the run's name

# Backend -> the packages whose versions affect its numbers; fla has all of them.
KERNELS = {"flex": ("triton",), "fla": ("triton", "fla")}

PATHS = ("data.path", "data.val_path", "tokenizer.path")
TYPED_PATHS = (*PATHS, "init_from", "cache_dir")
# Overrides left out of a run's name: the command's, and choices that the name begins with.
OF_COMMAND = ("experiment", "launcher", "resume", "run_dir", "trainer")
OF_COMMAND += ("attn", "recipe", "pattern", "part")


@lru_cache(maxsize=4096)  # every run of a sweep asks for the same keys again
def effect_of(key: str) -> Effect:
    """Return the effect of changing a setting, by its dotted name, or a config group's choice."""
    if key in PATHS:
        return Effect.PLACE
    if key in OF_COMMAND or re.match(r"hydra([./]|$)", key):
        return Effect.FIXED
    kind: Any = TrainConfig
    for name in re.split(r"[.\[]", key):
        hint = list_hints(kind).get(name) if is_dataclass(kind) else None
        for one in getattr(hint, "__metadata__", ()):
            if isinstance(one, Effect):
                return one
        kind = bare(hint)
    return Effect.RESULT


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
    results = {key: value for key, value in config.items() if effect_of(key) is Effect.RESULT}
    return results | {"budget": budget_words(config)}


def typed_paths(config: Mapping[str, str]) -> dict[str, str]:
    """Select from a config's flat settings the paths of text, tokenizer and starting weights."""
    return {k: v for k, v in config.items() if effect_of(k) is Effect.PLACE or k == "init_from"}


def budget_words(config: Mapping[str, str]) -> str:
    """Return the budget in words, such as `1000 steps`; the default only if no other is set."""
    units = {k.removeprefix("budget."): v for k, v in config.items() if k.startswith("budget.")}
    default, accuracy = units.pop("default_steps", None), units.pop("accuracy", "None")
    set_ = [f"{value} {unit}" for unit, value in sorted(units.items()) if value != "None"]
    words = " and ".join(set_) or (f"{default} steps" if default else "")
    early = f" or accuracy {accuracy} at one of {config.get('validation.count')} validations"
    return words + early * (accuracy != "None")


def settings_key(settings: Mapping[str, Any], budget: str | None = None) -> str:
    """Return a string that is equal for settings that make the same run.

    `settings` are nested, as in config.yaml. `budget`, in words, replaces theirs.
    """
    config = flat(dict(settings))
    parts = settings.get("part")
    extra = {
        "attn": config.get("choices.attn"),
        # The order of parts matters, and `config` does not show it.
        "parts": list(parts) if isinstance(parts, dict) else [],
        "seed": config["seed"],
    }
    # Only whether there are starting weights: `Provenance.weights` identifies them by content.
    starts = config.get("init_from", "None") != "None"
    extra |= {"starts": starts} | ({} if budget is None else {"budget": budget})
    return json.dumps(result_settings(config) | extra, sort_keys=True)


@dataclass(frozen=True)
class Provenance:
    """What a run's result depends on besides its settings; written to identity.json."""

    text: str  # sha256
    device: str
    code: dict[str, str]  # module -> hash, of code that affects the numbers
    weights: str | None = None  # sha256 of the weights in init_from, before conversion
    origin: str = ""  # `digest` of the run in init_from, if known
    # Code and budgets of earlier steps, if a resume changed them.
    earlier: list[dict[str, str]] = field(default_factory=list)

    @property
    def digest(self) -> str:
        """Eight hex digits that identify the code of the run and of its starting weights."""
        code = json.dumps([self.code, self.earlier, self.origin], sort_keys=True)
        return hashlib.sha256(code.encode()).hexdigest()[:8]

    @property
    def budgets(self) -> list[str]:
        """The run's earlier budgets, in words and in order, if resumes changed them."""
        return [part[BUDGET] for part in self.earlier if BUDGET in part]

    def at_first_budget(self) -> "Provenance":
        """Return the provenance as it was when the first of `budgets` ended."""
        end = next((i for i, part in enumerate(self.earlier) if BUDGET in part), None)
        if end is None:
            return self
        later = [part for part in self.earlier[end:] if BUDGET not in part]
        code = {k: v for k, v in later[0].items() if k != UNTIL} if later else self.code
        return replace(self, code=code, earlier=self.earlier[:end])


def hash_code_for(cfg: TrainConfig) -> dict[str, str]:
    """Return module -> hash for the code that affects the numbers of a run of these settings.

    Files are hashed once and cached. Call this before reading the text, which can take minutes: a
    file edited meanwhile is no longer the code that this process imported.
    """
    # Of tokenizers and data sources, only foreign modules are hashed: the text's hash covers ours.
    layers = [(one.attn, *one.part.values(), one.position) for one in cfg.kinds()]
    specs = (*chain(*layers), cfg.position, cfg.tokenizer, cfg.data)
    specs = (*specs, cfg.optim.matrices or {}, *cfg.trainer.callbacks.values())
    targets = [str(spec["_target_"]) for spec in specs if "_target_" in spec]
    if cfg.init_from is not None:
        targets.append("gptattn.weights.init_from")
    if cfg.validation.lengths:
        targets.append("gptattn.build.longer")
    # Lightning's own callbacks count by its version.
    lightning = ["lightning"] * any(target.startswith("lightning.") for target in targets)
    return hash_code(targets, [*cfg.allow_targets, *lightning])


def hash_kernels(cfg: TrainConfig, device: str) -> dict[str, str]:
    """Return the versions of the packages that compile these settings' kernels on a device."""
    backends = [kind.attn.get("backend", "") for kind in cfg.kinds()]
    backends += ["flex"] if cfg.compile is True and device == "cuda" else []
    return {one: hash_of(one) or "" for name in backends for one in KERNELS.get(name, ())}


def differences(was: Provenance | None, now: Provenance) -> list[str]:
    """List in words how a run's provenance differs from `now`; empty: the results would agree."""
    if was is None:
        return ["its code is unknown"]
    changed = list_changed(was.code, now.code)
    reasons = [f"different code in {', '.join(changed)}"] if changed else []
    if was.earlier != now.earlier:
        reasons.append("it was resumed with different code or a different budget")
    if was.origin != now.origin:
        reasons.append("different code made the weights in init_from")
    if was.text != now.text:
        reasons.append("different text")
    if was.weights != now.weights:
        reasons.append("different weights in init_from")
    if was.device != now.device:
        reasons.append(f"on {was.device}, not {now.device}")
    return reasons


def list_changed(was: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the modules whose hashes differ or that only one side has, sorted."""
    return sorted(name for name in was.keys() | now.keys() if was.get(name) != now.get(name))


def resume_provenance(
    was: Provenance | None, now: Provenance, step: int, budget: str = ""
) -> Provenance:
    """Return the provenance of a run that began with `was` and resumes after `step` with `now`.

    `budget`: its earlier budget, in words, if it resumes with another one; "" if it does not.
    """
    if was is None:
        was = replace(now, code={})
    # The budget first: `at_first_budget` needs the code that came up to its end.
    left = [{BUDGET: budget}] if budget and {BUDGET: budget} not in was.earlier else []
    left += [{**was.code, UNTIL: str(step)}] if was.code != now.code else []
    return replace(now, weights=was.weights, origin=was.origin, earlier=[*was.earlier, *left])
