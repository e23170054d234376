"""A run's folder. Only this module knows the files in it. It needs neither torch nor Hydra.

Files are written with `disk.write_atomically`. Files that are read may come from someone else.
"""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import yaml

from gptattn.data import tokenizer
from gptattn.machine import disk
from gptattn.machine.lock import hold_lock
from gptattn.runs.evaluation import Evaluation
from gptattn.runs.metrics import LOSS
from gptattn.settings.config import Effect, TrainConfig
from gptattn.settings.identity import NAMED, Provenance, effect_of
from gptattn.settings.record import complete_record

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C, if PyYAML was built with it

CONFIG, SUMMARY, ROWS, PROVENANCE = "config.yaml", "summary.json", "metrics.jsonl", "identity.json"
REPLACED, EVALUATION, FAILURE = "replaced.txt", "evaluation.json", "failure.json"
LOCK = ".lock"
WEIGHTS, CHECKPOINTS = "model.safetensors", "checkpoints"
# What a run or a converted model writes; it refuses a folder with other files of these names.
NAMES = (CONFIG, SUMMARY, ROWS, PROVENANCE, REPLACED, EVALUATION, FAILURE, WEIGHTS, CHECKPOINTS)
NAMES += (tokenizer.FOLDER,)
# In a sweep's folder: the runs that chose a learning rate, which are not results.
TUNING = "tuning"
CHECKPOINT = r"step=(\d+)\.safetensors"
# The most characters in a folder's name, and of the variant in it; config.yaml has the rest.
MAX_NAME, MAX_VARIANT = 60, 41


@dataclass(unsafe_hash=True)
class RunFolder:
    """A folder that holds, or will hold, a run or a converted model.

    Methods that read a file raise OSError if it cannot be read, and ValueError, naming the file, if
    it is damaged. Those that write one raise DiskError if the disk refuses.
    """

    path: Path

    def __post_init__(self) -> None:
        # The resolved settings as plain values. Writing this file claims the folder.
        self.config_file = self.path / CONFIG
        # One row of metrics per line, appended as they are measured: the source of truth.
        self.rows_file = self.path / ROWS
        self.summary_file = self.path / SUMMARY  # written last: it exists once the run is done
        self.checkpoints = self.path / CHECKPOINTS  # `step=40.safetensors`, and the one before
        # The weights of a converted model, which has no checkpoints; a run has no such file.
        self.weights_file = self.path / WEIGHTS
        self.tokenizer = self.path / tokenizer.FOLDER  # copies, since the original path may move
        self.maps = self.path / "attention"  # the default folder for pictures
        self.console_file = self.path / "console.log"  # of a run that is part of a sweep
        self.replaced_file = self.path / REPLACED  # why a result no longer counts
        self.failure_file = self.path / FAILURE  # why the run ended early

    @property
    def begun(self) -> bool:
        """Whether a run has claimed the folder."""
        return self.config_file.exists()

    @property
    def done(self) -> bool:
        """Whether the run has written its summary."""
        return self.summary_file.is_file()

    @property
    def replaced(self) -> bool:
        """Whether the run is marked as a result that no longer counts."""
        return self.replaced_file.exists()

    def mark_replaced(self, reason: str) -> None:
        """Mark the run as a result that no longer counts."""
        self._write(REPLACED, f"{reason}\n")

    def read_settings(self) -> dict[str, Any]:
        """Return `read_record` with the defaults of settings that are newer than the run."""
        settings = self.read_record()
        complete_record(settings)
        return settings

    def read_record(self) -> dict[str, Any]:
        """Return the settings as plain values, not checked: any version may have written them."""
        try:
            settings = yaml.load(self.config_file.read_bytes(), Loader=LOADER)
        except yaml.YAMLError as error:
            raise ValueError(f"{CONFIG} is damaged: {' '.join(str(error).split())}") from None
        if not isinstance(settings, dict):
            raise ValueError(f"{CONFIG} holds no settings")
        return settings

    def write_settings(self, cfg: TrainConfig) -> None:
        """Write the settings, which claims the folder."""
        self._write(CONFIG, yaml.safe_dump(asdict(cfg), sort_keys=False, allow_unicode=True))

    def read_summary(self) -> dict[str, Any]:
        """Return the whole summary, even if its status is not `done`."""
        text = self.summary_file.read_bytes()
        try:
            summary = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{SUMMARY} is damaged or half-written: {error}") from None
        if not isinstance(summary, dict):
            raise ValueError(f"{SUMMARY} is damaged: it is not a JSON object")
        return summary

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write the summary, which marks the run as done."""
        self._write(SUMMARY, json.dumps(summary, indent=2, ensure_ascii=False) + "\n")

    def finished_summary(self) -> dict[str, Any] | None:
        """Return the summary of a run that is done; None if it is missing, damaged or not done."""
        summary = disk.read_json(self.summary_file, dict[str, Any]) or {}
        return summary if summary.get("status") == "done" else None

    def final_loss(self) -> float | None:
        """Return the validation loss in the summary; None if there is no finite one."""
        return ((self.finished_summary() or {}).get("metrics") or {}).get(LOSS)

    def read_provenance(self) -> Provenance | None:
        """Return the run's provenance; None if it has no readable record of it."""
        return disk.read_json(self.path / PROVENANCE, Provenance)

    def write_provenance(self, provenance: Provenance) -> None:
        """Write the run's provenance."""
        disk.write_json(self.path / PROVENANCE, provenance)

    def read_evaluation(self) -> Evaluation | None:
        """Return what `evaluate` measured on the run; None if it has measured nothing."""
        try:
            return msgspec.json.decode((self.path / EVALUATION).read_bytes(), type=Evaluation)
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise ValueError(f"{EVALUATION} is damaged: {error}") from None

    def write_evaluation(self, evaluation: Evaluation) -> None:
        """Write or replace what `evaluate` measured on the run."""
        disk.write_json(self.path / EVALUATION, evaluation)

    def read_failure(self) -> dict[str, Any] | None:
        """Return a failed run's exit code (`exit`) and error; None if it did not fail."""
        return disk.read_json(self.failure_file, dict[str, Any])

    def write_failure(self, exit_code: int, error: str) -> None:
        """Record that the run ended early, with this exit code and error."""
        self._write(FAILURE, json.dumps({"exit": exit_code, "error": error}) + "\n")

    def write_tokenizer(self, files: Mapping[str, str]) -> None:
        """Write copies of the tokenizer's files; `files` maps names to texts."""
        tokenizer.write_files(self.tokenizer, files)

    def _write(self, name: str, text: str) -> None:
        disk.write_atomically(self.path / name, lambda file: file.write(text.encode()))

    def checkpoint(self, step: int) -> Path:
        """Return the path of the checkpoint after `step` optimizer steps."""
        return self.checkpoints / f"step={step}.safetensors"

    def known_checkpoints(self) -> list[Path]:
        """Return the paths of all checkpoints, newest first."""
        files = [f for f in self.checkpoints.glob("step=*.safetensors") if step_of(f) >= 0]
        return sorted(files, key=step_of, reverse=True)

    def lock(self, field: str = "run_dir") -> AbstractContextManager[None]:
        """Hold the run's lock. Raises RunFolderError, naming `field`, if another process does."""
        busy = f"another process is writing to {self.path}; wait for it, or stop it"
        return hold_lock(self.path / LOCK, field, busy)


def name_run(cfg: TrainConfig, overrides: Sequence[str]) -> str:
    """Return `<variant>_s<seed>[+key-value...]_<id>`; the random id keeps equal runs apart.

    The name includes the `overrides` that change the result; of a path, it has only the end. It
    needs no quotes in a shell or in Hydra.
    """
    name = f"{cfg.variant[:MAX_VARIANT]}_s{cfg.seed}"
    for key, value in (override.lstrip("+~").split("=", 1) for override in overrides):
        if (kind := effect_of(key.partition("@")[0])) in NAMED:
            shown = Path(value.strip("'\"")).name if kind is Effect.PLACE else value
            name += f"+{key.rpartition('.')[2]}-{shown}"
    safe = re.sub(r"[^\w.+-]", "-", name, flags=re.ASCII)
    return f"{safe[: MAX_NAME - 7]}_{secrets.token_hex(3)}"


def step_of(checkpoint: Path) -> int:
    """Return the optimizer step in a checkpoint's name; -1 if the name has none."""
    match = re.fullmatch(CHECKPOINT, checkpoint.name)
    return int(match.group(1)) if match else -1


def find_begun(home: Path) -> list[RunFolder]:
    """Return the begun runs directly below `home`, newest settings first."""
    files = [file for file in home.glob(f"*/{CONFIG}") if file.is_file()]
    files.sort(key=lambda file: file.stat().st_mtime, reverse=True)
    return [RunFolder(file.parent) for file in files]
