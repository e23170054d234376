"""What sets runs apart into sections of the report: one size, at one budget, on one text.

Inside of a section stands what is compared: attention, position, block, optimizer. What a variant
has of its own, as a width that `match` chose or a learning rate that was tuned, parts no section.
"""

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gptattn.compare.finished_runs import Run
from gptattn.compare.groups import counted
from gptattn.errors import ConfigError

SIZES = ("num_layers", "d_model", "context_length", "vocab_size")
LONGEST = 20  # characters of a setting that a title shows


@dataclass(frozen=True)
class RunSet:
    """Runs that can be compared with each other."""

    title: str  # what sets it apart from the other sets; "" for the only one
    size: str  # the part of the title that tells the model's size
    family: str  # the rest of it: the same for sets that differ in size alone
    runs: list[Run]


def _data(run: Run) -> list[str]:
    text = run.data.get("text_sha256", "?")[:8]
    return [f"text {text}", f"{run.data.get('val_tokens', '?')} validation tokens"]


def _tokenizer(run: Run) -> list[str]:
    # Files are told apart by their sha256, wherever they lie.
    settings = [
        f"{key.removeprefix('tokenizer.')}={_short(value)}"
        for key, value in sorted(run.settings.items())
        if key.startswith("tokenizer.") and key not in ("tokenizer._target_", "tokenizer.path")
    ]
    target = run.settings.get("tokenizer._target_", "").rpartition(".")[2]
    return [" ".join(filter(None, [run.data.get("tokenizer", ""), target, *settings])) or "?"]


def _short(value: str) -> str:
    """The value, or what tells it from others: a character vocabulary is no title."""
    return value if len(value) <= LONGEST else f"#{hashlib.sha256(value.encode()).hexdigest()[:8]}"


def _validation(run: Run) -> list[str]:
    return [f"{k}={v}" for k, v in sorted(run.settings.items()) if k.startswith("validation.")]


def _model(run: Run) -> list[str]:
    found = [f"{key}={run.settings.get(f'model.{key}')}" for key in SIZES]
    return [*found, f"d_mlp={_width(run)}"]


def _width(run: Run) -> str:
    """Of the MLP, as it was before `match`, where that changed it."""
    width = run.settings.get("model.d_mlp", "None")
    if run.match is not None and run.match.field == "model.d_mlp":
        width = f"{run.match.before:g}" if run.match.before else "None"
    elif run.settings.get("match") in ("params", "flops"):
        width = "None"  # what it was is not known: most likely the default
    d_model = run.settings.get("model.d_model", "")
    default = str(4 * int(d_model)) if d_model.isdecimal() else "None"
    return "4 * d_model" if width in ("None", default) else width


def _budget(run: Run) -> list[str]:
    return [re.sub(r"(?<![\d.])\d{4,}", lambda digits: f"{int(digits[0]):,}", run.budget or "?")]


def _setting(key: str) -> Callable[[Run], list[str]]:
    return lambda run: [f"{key}={run.settings.get(key)}"]


def _weights(run: Run) -> list[str]:
    return ["from other weights" if run.origin else "from scratch"]


# Without these in common two losses have nothing to do with each other.
MUST_AGREE: dict[str, Callable[[Run], list[str]]] = {
    "data": _data,
    "tokenizer": _tokenizer,
    "validation": _validation,
}
AXES: dict[str, Callable[[Run], list[str]]] = {
    **MUST_AGREE,
    "model": _model,
    "budget": _budget,
    "batch_size": _setting("batch_size"),
    "precision": _setting("trainer.precision"),
    "device": _setting("device"),
    "weights": _weights,
}


def comparable_sets(runs: Sequence[Run], split: bool) -> list[RunSet]:
    """The runs in sets that can be compared, smaller models first.

    Raises ConfigError where they have no text, tokenizer or validation in common, and `split` was
    not asked for.
    """
    refusal = differences(runs)
    if refusal and not split:
        raise ConfigError(
            "comparison",
            f"the runs differ in {refusal}; --split reports each apart, or give fewer folders",
        )
    sets: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        sets.setdefault(tuple(words_of(axis, run) for axis in AXES), []).append(run)
    firsts = [members[0] for members in sets.values()]
    return [_named(members, firsts) for members in sorted(sets.values(), key=_order)]


def _named(members: list[Run], firsts: Sequence[Run]) -> RunSet:
    parts = {axis: told(axis, members[0], firsts) for axis in AXES}
    others = [part for axis, part in parts.items() if part and axis != "model"]
    title = ", ".join(filter(None, parts.values()))
    return RunSet(title, parts["model"], ", ".join(others), members)


def words_of(axis: str, run: Run) -> str:
    return ", ".join(AXES[axis](run)) or "?"


def differences(runs: Sequence[Run]) -> str:
    """`data (text 1a2b3c4d: 2 runs; ...)`: what forbids a comparison; "" where nothing does."""
    found = []
    for axis in MUST_AGREE:
        values = [words_of(axis, run) for run in runs]
        if len(set(values)) > 1:
            found.append(f"{axis} ({counted(values)})")
    return " and ".join(found)


def told(axis: str, run: Run, runs: Sequence[Run]) -> str:
    """What tells the run from others on this axis; "" where they are alike.

    The file that was picked (`model=nano`) where that tells all, otherwise what differs.
    """
    values = {words_of(axis, other) for other in runs}
    if len(values) == 1:
        return ""
    picked = {(other.choices.get(axis, ""), words_of(axis, other)) for other in runs}
    choices = {choice for choice, _ in picked}
    if len(picked) == len(values) == len(choices) and "" not in choices:
        return f"{axis}={run.choices[axis]}"
    common = set.intersection(*(set(AXES[axis](other)) for other in runs))
    return " ".join(part for part in AXES[axis](run) if part not in common)


def _order(runs: Sequence[Run]) -> list[object]:
    """Text by text, then by size, then as numbers in the words are counted: 200 before 1,000."""
    params = min(run.metrics.get("cost/params", 0.0) for run in runs)
    words = [words_of(axis, runs[0]) for axis in AXES]
    text, rest = words[: len(MUST_AGREE)], " ".join(words[len(MUST_AGREE) :]).replace(",", "")
    return [text, params, *(int(w) if w.isdecimal() else w for w in re.split(r"(\d+)", rest))]
