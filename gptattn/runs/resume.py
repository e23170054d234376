"""Where a run resumes, and whether its text, tokenizer and device are unchanged.

`training/run.py` resumes it; `settings/compose.py` says which settings may change then.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gptattn.build.data import build_tokenizer
from gptattn.build.model import build_model
from gptattn.data.run_data import RunData
from gptattn.errors import CheckpointError, ConfigError
from gptattn.runs.folder import RunFolder
from gptattn.runs.load import newest_checkpoint, use_kept_tokenizer
from gptattn.settings.config import TrainConfig

CALLBACKS = ("StepClock", "MetricRows", "Checkpoints")  # read before Lightning restores them


@dataclass(frozen=True)
class Start:
    """Where a run resumes: at a checkpoint, or at step 0 if it has none yet.

    The defaults are those of step 0.
    """

    source: Path | None = None  # the checkpoint; None: the run starts at step 0
    step: int = 0  # optimizer steps taken
    seconds: float = 0.0  # of training so far
    bytes_of_rows: int = 0  # in metrics.jsonl, written before it
    completed: tuple[dict[str, Any], ...] = ()  # budgets, as in summary.json
    facts: dict[str, Any] = field(default_factory=dict)  # from `collect_facts`


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


def find_start(folder: RunFolder, cfg: TrainConfig) -> Start:
    """Return where to resume the run: its newest good checkpoint; a warning names damaged ones.

    Raises CheckpointError if the run was made without checkpoints, if a finished run has lost them,
    or if none that it has is good.
    """
    if not cfg.checkpoint:
        raise CheckpointError(
            "resume",
            f"{folder.path} was made with checkpoint=false; start again with checkpoint=true",
        )
    known = folder.known_checkpoints()
    if cfg.budget.steps != 0 and folder.done and not known:
        raise CheckpointError(
            "resume",
            f"{folder.path} is finished and its checkpoints are gone; start a new run for more "
            "steps",
        )
    # A run of 0 steps only validates the model, and does so again.
    if cfg.budget.steps == 0 or not known:
        return Start()
    vocab_size = build_tokenizer(use_kept_tokenizer(cfg, folder)).vocab_size
    with torch.device("meta"):
        outlined = build_model(cfg, vocab_size)
    source, content = newest_checkpoint(folder, outlined)
    clock, rows, facts = (content["callbacks"][key] for key in CALLBACKS)
    return Start(
        source,
        content["global_step"],
        clock["seconds"],
        rows["bytes"],
        tuple(rows["completed"]),
        facts,
    )


def check_same(start: Start, now: dict[str, Any]) -> None:
    """Raise ConfigError if the text, the tokenizer or the device has changed since the run began.

    `now` is from `collect_facts`. Another torch or number of processes only gives a warning.
    """
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
    for name in ("torch", "processes"):
        if was[name] != now[name]:
            print(
                f"warning: {name}: {was[name]} before, {now[name]} from now on: the last bits, and "
                "masks of dropout, may differ",
                file=sys.stderr,
            )
