"""Where a run that was stopped goes on, and whether what it needs is still what it was."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gptattn.data.tokens import TokenData
from gptattn.errors import CheckpointError, ConfigError
from gptattn.runs.checkpoint import refuse_pickles
from gptattn.runs.folder import RunFolder
from gptattn.runs.load import resumable
from gptattn.runs.resume_state import FACTS, SAVED_BY, check_state
from gptattn.settings.budget import Budget
from gptattn.settings.config import TrainConfig


@dataclass(frozen=True)
class Start:
    """From where a run goes on: a checkpoint, or its very beginning where it has none yet."""

    source: Path | None = None
    step: int = 0
    validated: bool = True
    seconds: float = 0.0  # of training
    rows: int = 0  # of metrics.jsonl that are before it
    facts: dict[str, Any] = field(default_factory=dict)
    content: dict[str, Any] = field(default_factory=dict)  # of the checkpoint

    def weights(self) -> dict[str, torch.Tensor]:
        """By their names in the model."""
        return self.content["weights"]


def facts_of(data: TokenData, device: torch.device, threads: int) -> dict[str, Any]:
    """What must be the same when the run goes on, and what cannot be found out again."""
    return {
        "text_sha256": data.text_hash,
        "tokenizer": data.tokenizer.fingerprint(),
        "device": device.type,
        "threads": threads,
        "torch": str(torch.__version__),
    }


def find_start(folder: Path, cfg: TrainConfig) -> Start:
    """The newest good checkpoint of the run; a warning names those that are damaged.

    The run's folder must be locked: what a killed save left is removed. Raises CheckpointError
    where the run keeps no checkpoints, or where none of those that it had is good.
    """
    run = RunFolder(folder)
    run.remove_leftovers()
    if not cfg.checkpoint:
        raise CheckpointError(
            "resume",
            f"{folder} was made with checkpoint=false; start it anew, with checkpoint=true",
        )
    refuse_pickles(run)
    # Without a step there is nothing but a validation, which is made again.
    if cfg.budget.steps == 0 or not run.known_checkpoints():
        return Start()
    chosen = resumable(run, cfg, check_state)
    content = chosen.content
    clock, rows, own = (content["callbacks"][key] for key in SAVED_BY)
    return Start(
        chosen.path,
        content["global_step"],
        own["validated"],
        clock["seconds"],
        rows["rows"],
        {name: own[name] for name in FACTS},
        content,
    )


def check_same(start: Start, now: dict[str, Any]) -> None:
    """Raise ConfigError where the run would not go on as it began; `now` is from `facts_of`."""
    if start.source is None:
        return
    was = start.facts
    for name, setting, what in (
        ("text_sha256", "data", "the text"),
        ("tokenizer", "tokenizer", "the tokenizer"),
    ):
        if was[name] != now[name]:
            raise ConfigError(
                setting, f"{what} has changed since the run began; put back what it was"
            )
    if was["device"] != now["device"]:
        raise ConfigError(
            "trainer.accelerator",
            f"the run began on {was['device']}, and this would be {now['device']}",
        )
    if was["torch"] != now["torch"]:
        print(
            f"warning: torch: the run began with {was['torch']}, this is {now['torch']}: the last "
            "bits may differ",
            file=sys.stderr,
        )


def check_budget(start: Start, budget: Budget) -> bool:
    """Whether nothing is left to train. Raises ConfigError for a budget below what was spent."""
    if budget.steps is not None and budget.steps < start.step:
        raise ConfigError(
            "budget", f"comes to {budget.steps} steps, and {start.step} are taken; give more"
        )
    return budget.progress(start.step, start.seconds) >= 1.0
