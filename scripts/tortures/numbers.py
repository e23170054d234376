"""Numbers that are none, and numbers that must be the same again."""

import math
import re
from pathlib import Path

import torch

from gptattn.runs.checkpoint import read_checkpoint
from gptattn.runs.folder import RunFolder
from tortures.bench import STEPS, VALIDATIONS, VARIANTS, Bench, Result, fingerprint
from tortures.faults import Poison

VALUES = (math.nan, math.inf, -math.inf)
METRIC = {  # what the line must name
    "loss": r"train/loss",
    "gradient": r"train/grad_norm",
    "weight": r"train/loss|train/grad_norm|val/loss|weight \S+|exp_avg\w* of \S+",
    "validation": r"val/loss",
}


def nan(bench: Bench, count: int, result: Result) -> None:
    """NaN and Inf in a loss, a gradient, a weight, a validation; then the run goes on without."""
    for i in range(count):
        bench.draw("nan", i)
        result.tried += 1
        name = f"nan_{i}"
        place = Poison.PLACES[i % len(Poison.PLACES)]
        step = bench.random.randint(2, STEPS - 2)
        poison = Poison(place, VALUES[i % len(VALUES)], step)
        process = bench.begin(name, bench.variant_of(name), inside=poison)
        code, line = process.wait(), process.complaint()
        result.check(code == 5, f"{place}: ended with {code}: {line}")
        said = re.match(rf"error: ({METRIC[place]}): is .* (?:at|after) step (\d+);", line)
        result.check(said is not None, f"{place} at step {step}: {line!r}")
        # All but a validation's shows in its step or the one after.
        within = STEPS // VALIDATIONS if place == "validation" else 1
        late = int(said.group(2)) - step if said else 0
        result.check(0 <= late <= within, f"{place} at step {step} was seen at step {step + late}")
        result.count(f"stopped: {place}", int(code == 5 and said is not None))
        bad = [path for path in _checkpoints(bench.folder / name) if not _is_finite(path)]
        result.count("checkpoints that are not finite", len(bad))
        result.check(not bad, f"{bad} are not finite")
        bench.finish(name, result)


def _checkpoints(run: Path) -> list[Path]:
    return RunFolder(run).known_checkpoints()


def _is_finite(path: Path) -> bool:
    content = read_checkpoint(path)
    values = list(content["weights"].values())
    for state in content["optimizer"].values():
        values += state.values()
    return all(bool(torch.isfinite(value).all()) for value in values)


def same(bench: Bench, count: int, result: Result) -> None:
    """The same command again."""
    for i in range(count):
        result.tried += 1
        variant, name = VARIANTS[i % len(VARIANTS)], f"same_{i}"
        code = bench.begin(name, variant).wait()
        equal = code == 0 and fingerprint(bench.folder / name) == bench.expected(variant)
        result.count("identical", int(equal))
        result.check(equal, f"{variant} gave different numbers")
