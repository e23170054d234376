"""Finds where a run resumes, checks that its text, tokenizer and device have not changed, and
updates its provenance. `training/run.py` resumes it; `settings/compose.py` limits what may change.
"""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from gptattn.data.run_data import RunData
from gptattn.errors import CheckpointError, ConfigError
from gptattn.model.gpt import GPT
from gptattn.runs.checkpoint import RunState
from gptattn.runs.folder import RunFolder
from gptattn.runs.load import newest_checkpoint
from gptattn.settings.config import TrainConfig
from gptattn.settings.identity import (
    UNTIL,
    Provenance,
    budget_words,
    flat,
    list_changed,
    resume_provenance,
)


def collect_facts(
    data: RunData, device: torch.device, threads: int, processes: int
) -> dict[str, Any]:
    """Return the facts that a checkpoint records, to compare a resumed run with."""
    return {
        "text_sha256": data.text_hash,
        "tokenizer": data.tokenizer.fingerprint(),
        "device": device.type,
        "threads": threads,
        "processes": processes,
        "torch": str(torch.__version__),
    }


def find_resume_point(
    folder: RunFolder, cfg: TrainConfig, model: GPT
) -> tuple[Path | None, RunState]:
    """Return the newest good checkpoint to resume the run from, and the state that it holds.

    Return None, and the state at step 0, if it has no checkpoint yet. Of `model`, only names and
    shapes count. Warns about damaged checkpoints.

    Raises CheckpointError if the run was made without checkpoints, if a finished run has lost them,
    or if all of them are damaged.
    """
    checkpoints = folder.known_checkpoints()
    if not cfg.checkpoint or (cfg.budget.steps != 0 and folder.done and not checkpoints):
        why = "was made with checkpoint=false, or its checkpoints are gone"
        raise CheckpointError("resume", f"{folder.path} {why}; start a new run")
    # A run of 0 steps only validates the model, and now repeats that.
    if cfg.budget.steps == 0 or not checkpoints:
        return None, RunState()
    source, content = newest_checkpoint(folder, model)
    return source, RunState.restore(content)


def check_same(was: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise ConfigError if the text, the tokenizer or the device has changed since the run began.

    Both are from `collect_facts`. Another torch or number of processes only causes a warning.
    """
    for name, setting, what in (
        ("text_sha256", "data", "the text"),
        ("tokenizer", "tokenizer", "the tokenizer"),
        ("device", "trainer.accelerator", "the device"),
    ):
        if was[name] != now[name]:
            raise ConfigError(setting, f"{what} has changed since the run began; change it back")
    for name in ("torch", "processes"):
        if was[name] != now[name]:
            print(
                f"warning: {name}: was {was[name]}, is now {now[name]}; the last bits and dropout "
                "masks may differ",
                file=sys.stderr,
            )


def continue_provenance(
    folder: RunFolder, cfg: TrainConfig, now: Provenance, state: RunState
) -> Provenance:
    """Return the provenance of a run that resumes from this state, with these settings.

    Warns if its code has changed, or its budget before it was used up.
    """
    separate = "so reports list this run separately"
    was, budget = (budget_words(flat(node)) for node in (folder.read_settings(), asdict(cfg)))
    earlier = was if state.step and was != budget else ""
    if earlier and not state.complete:
        earlier = f"{was} {UNTIL} {state.step}"
        change = "resuming with another budget changes the learning-rate schedule"
        print(f"warning: budget: {change} (so far: {earlier}), {separate}", file=sys.stderr)
    before = folder.read_provenance()
    if before is None or before.code != now.code:
        names = "unknown" if before is None else ", ".join(list_changed(before.code, now.code))
        changed = f"the code has changed since the run began ({names})"
        print(f"warning: resume: {changed}, {separate}", file=sys.stderr)
    return resume_provenance(before, now, state.step, earlier)
