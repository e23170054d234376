"""From where a stopped run is resumed, and whether its text, tokenizer and device are unchanged."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gptattn.data.run_data import RunData
from gptattn.errors import CheckpointError, ConfigError
from gptattn.runs.checkpoint import read_checkpoint, refuse_pickles
from gptattn.runs.folder import RunFolder
from gptattn.runs.load import resumable
from gptattn.runs.resume_state import CALLBACK_KEYS, FACTS, check_state
from gptattn.settings.budget import Budget
from gptattn.settings.build import build_matrix_rule
from gptattn.settings.config import TrainConfig


@dataclass(frozen=True)
class Start:
    """From where a run is resumed: a checkpoint, or step 0 if it has none yet.

    The defaults are those of step 0.
    """

    source: Path | None = None  # the checkpoint; None: the run starts at step 0
    step: int = 0  # optimizer steps taken
    validated: bool = True  # False: the validation after this step may still be due
    seconds: float = 0.0  # of training so far
    rows: int = 0  # rows of metrics.jsonl that were written before it
    facts: dict[str, Any] = field(default_factory=dict)  # from `facts_of`
    content: dict[str, Any] = field(default_factory=dict)  # of the checkpoint

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the weights by their names in the model. Raises KeyError at step 0."""
        return self.content["weights"]

    def threads(self, processes: int) -> int | None:
        """Return the CPU threads that each of so many processes had; None if others took the steps.

        Their number changes the last bits, so it is used again.
        """
        same = self.facts.get("processes") == processes
        return self.facts.get("threads") if same else None


def facts_of(
    data: RunData, device: torch.device, threads: int, processes: int = 1
) -> dict[str, Any]:
    """Return the facts that a checkpoint records, because a resumed run is compared with them.

    The number of threads is not compared: see `Start.threads`.
    """
    return {
        "text_sha256": data.text_hash,
        "tokenizer": data.tokenizer.fingerprint(),
        "device": device.type,
        "threads": threads,
        "processes": processes,
        "torch": str(torch.__version__),
    }


def find_start(folder: Path, cfg: TrainConfig) -> Start:
    """Return where to resume the run: its newest good checkpoint; a warning names damaged ones.

    The run's folder must be locked, because this removes the unfinished files of killed processes.
    Raises CheckpointError if the run was made without checkpoints, if a finished run has lost them,
    or if none that it has is good.
    """
    run = RunFolder(folder)
    run.remove_leftovers()
    if not cfg.checkpoint:
        raise CheckpointError(
            "resume",
            f"{folder} was made with checkpoint=false; start again with checkpoint=true",
        )
    refuse_pickles(run)
    if cfg.budget.steps != 0 and run.done and not run.known_checkpoints():
        raise CheckpointError(
            "resume",
            f"{folder} is finished and its checkpoints are gone; start a new run for more steps",
        )
    # A run of 0 steps only validates the model, and does so again.
    if cfg.budget.steps == 0 or not run.known_checkpoints():
        return Start()
    rule = build_matrix_rule(cfg)
    chosen = resumable(run, cfg, lambda content, model: check_state(content, model, rule))
    content = chosen.content
    return _start(chosen.path, content)


def start_at(path: Path | None) -> Start:
    """Return the start from a checkpoint that another process has found by `find_start`."""
    return Start() if path is None else _start(path, read_checkpoint(path))


def _start(path: Path, content: dict[str, Any]) -> Start:
    clock, rows, own = (content["callbacks"][key] for key in CALLBACK_KEYS)
    return Start(
        path,
        content["global_step"],
        own["validated"],
        clock["seconds"],
        rows["rows"],
        # A version that knew of no more processes recorded none.
        {"processes": 1} | {name: own[name] for name in FACTS if name in own},
        content,
    )


def check_same(start: Start, now: dict[str, Any], *, warn: bool = True) -> None:
    """Raise ConfigError if the text, the tokenizer or the device has changed since the run began.

    `now` is from `facts_of`. Another torch or number of processes only gives a warning.
    """
    if start.source is None:
        return
    was = start.facts
    for name, setting, what in (
        ("text_sha256", "data", "the text"),
        ("tokenizer", "tokenizer", "the tokenizer"),
    ):
        if was[name] != now[name]:
            raise ConfigError(setting, f"{what} has changed since the run began; restore it")
    if was["device"] != now["device"]:
        raise ConfigError(
            "trainer.accelerator",
            f"the run began on {was['device']}, and this is {now['device']}; resume it there",
        )
    if warn and was["torch"] != now["torch"]:
        print(
            f"warning: torch: the run began with {was['torch']}, this is {now['torch']}: the last "
            "bits may differ",
            file=sys.stderr,
        )
    if warn and was["processes"] != now["processes"]:
        print(
            f"warning: trainer.devices: {was['processes']} processes made the steps so far, "
            f"{now['processes']} go on: the last bits, and masks of dropout, may differ",
            file=sys.stderr,
        )


def check_budget(start: Start, budget: Budget) -> bool:
    """Return whether the budget is used up. Raises ConfigError if more steps than it are taken."""
    if budget.steps is not None and budget.steps < start.step:
        raise ConfigError(
            "budget",
            f"comes to {budget.steps} steps, but {start.step} are already taken; give more",
        )
    return budget.progress(start.step, start.seconds) >= 1.0
