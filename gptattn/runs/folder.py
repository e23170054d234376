"""A run's folder: the only module that knows the files in it. It needs no torch and no Hydra.

Files are written with `disk.write_atomically`. Files that are read may have been made by others.
"""

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import yaml

from gptattn.data import tokenizer_files
from gptattn.machine import disk
from gptattn.machine.untrusted import read_bytes, read_yaml
from gptattn.runs.evaluation import Evaluation
from gptattn.settings.config import TrainConfig
from gptattn.settings.identity import Making, as_today

# The most bytes that are read. A run writes about 2 kB of settings, 2 kB of summary and 5 kB of
# making, but a tokenizer of 65,536 characters lists them all in the settings.
CONFIG_BYTES, SUMMARY_BYTES, MAKING_BYTES = 1_000_000, 5_000_000, 1_000_000
EVALUATION_BYTES = 1_000_000  # an evaluation of ten lengths and ten caches has about 10 kB

CONFIG, SUMMARY, ROWS, MAKING = "config.yaml", "summary.json", "metrics.jsonl", "identity.json"
REPLACED, EVALUATION = "replaced.txt", "evaluation.json"
# Below a sweep's folder: the runs that chose a learning rate, which are no results.
TUNING = "tuning"
CHECKPOINT, SUM = r"step=(\d+)\.safetensors", ".sha256"
# Pattern of the files that a killed process may have left unfinished in a folder of the run.
FILE_NAMES = "|".join(
    [
        *map(re.escape, (CONFIG, SUMMARY, ROWS, MAKING, REPLACED, EVALUATION)),
        *map(re.escape, tokenizer_files.FILES),
        rf"{CHECKPOINT}(?:{re.escape(SUM)})?",
    ]
)


@dataclass(frozen=True)
class RunFolder:
    """A folder that holds a run or a converted model, or will hold one.

    The methods that read a file raise OSError if it cannot be read, and ValueError, naming the
    file, if it is damaged or too large. Those that write one raise DiskError if the disk refuses.
    """

    path: Path

    @property
    def config_file(self) -> Path:
        """The resolved settings as plain values. Writing this file claims the folder."""
        return self.path / CONFIG

    @property
    def rows_file(self) -> Path:
        """One row of metrics per line, appended as they are measured: the source of truth."""
        return self.path / ROWS

    @property
    def events_file(self) -> Path:
        """The beginning of the names of TensorBoard's files, which show the same rows."""
        return self.path / "events.out.tfevents"

    @property
    def summary_file(self) -> Path:
        """The file that a run writes last: it exists if the run is done."""
        return self.path / SUMMARY

    @property
    def making_file(self) -> Path:
        """What the run's result depends on beside its settings; see `Making`."""
        return self.path / MAKING

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints: `step=40.safetensors` and `step=40.safetensors.sha256`."""
        return self.path / "checkpoints"

    @property
    def weights_file(self) -> Path:
        """The weights of a converted model, which has no checkpoints; a run has no such file."""
        return self.path / "model.safetensors"

    @property
    def tokenizer(self) -> Path:
        """The folder with copies of the tokenizer's files, since the original path may move."""
        return self.path / tokenizer_files.IN_RUN

    @property
    def maps(self) -> Path:
        """The default folder for pictures of the run's attention."""
        return self.path / "attention"

    @property
    def trackers(self) -> Path:
        """The folder of the trackers beside TensorBoard: what they write, and a state of each."""
        return self.path / "trackers"

    def tracker_file(self, name: str) -> Path:
        """Return the path of what is known of the run in this tracker."""
        return self.trackers / f"{name}.json"

    @property
    def console_file(self) -> Path:
        """The console output of a run that is part of a sweep."""
        return self.path / "console.log"

    @property
    def replaced_file(self) -> Path:
        """The mark of a result that no longer counts, with the reason."""
        return self.path / REPLACED

    @property
    def evaluation_file(self) -> Path:
        """What `evaluate` has measured of the finished run."""
        return self.path / EVALUATION

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
        """Whether the run has the mark of a result that no longer counts."""
        return self.replaced_file.exists()

    def mark_replaced(self, reason: str) -> None:
        """Mark the run as a result that no longer counts."""
        self._write(REPLACED, f"{reason}\n")

    @property
    def done_at(self) -> float:
        """When the run was done, in seconds since 1970. Raises OSError if it is not done."""
        return self.summary_file.stat().st_mtime

    def read_settings(self) -> dict[str, Any]:
        """Return the settings as plain values, not checked: any version may have written them."""
        try:
            settings = read_yaml(self.config_file, CONFIG_BYTES)
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
        text = read_bytes(self.summary_file, SUMMARY_BYTES)
        try:
            summary = json.loads(text.decode())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{SUMMARY} is damaged or half-written: {error}") from None
        if not isinstance(summary, dict):
            raise ValueError(f"{SUMMARY} is damaged: it holds no names")
        return summary

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write the summary, which marks the run as done."""
        self._write(SUMMARY, json.dumps(summary, indent=2, ensure_ascii=False) + "\n")

    def finished(self) -> dict[str, Any] | None:
        """Return the summary of a run that is done; None if it is missing, damaged or not done."""
        try:
            summary = self.read_summary()
        except (OSError, ValueError):
            return None
        return summary if summary.get("status") == "done" else None

    def final_loss(self) -> float | None:
        """Return the validation loss in the summary; None if there is no finite one."""
        try:
            loss = float(self.read_summary()["metrics"]["val/loss"])
        except (OSError, ValueError, LookupError, TypeError, OverflowError):
            return None
        return loss if math.isfinite(loss) else None

    def read_making(self) -> Making | None:
        """Return what made the run; None if there is no record of it that can be read."""
        try:
            text = read_bytes(self.making_file, MAKING_BYTES)
            return as_today(msgspec.json.decode(text, type=Making))
        except (OSError, ValueError, msgspec.MsgspecError):
            return None

    def write_making(self, making: Making) -> None:
        """Write what made the run."""
        self._write(MAKING, json.dumps(asdict(making), indent=1) + "\n")

    def read_evaluation(self) -> Evaluation | None:
        """Return what `evaluate` has measured of the run; None if it has measured nothing."""
        try:
            text = read_bytes(self.evaluation_file, EVALUATION_BYTES)
            return msgspec.json.decode(text, type=Evaluation)
        except FileNotFoundError:
            return None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{EVALUATION} is damaged: {error}") from None

    def write_evaluation(self, evaluation: Evaluation) -> None:
        """Write or replace what was measured of the run."""
        text = json.dumps(msgspec.to_builtins(evaluation, str_keys=True), indent=1)
        self._write(EVALUATION, f"{text}\n")

    def write_tokenizer(self, files: Mapping[str, str]) -> None:
        """Write copies of the tokenizer's files; `files` maps names to texts."""
        tokenizer_files.write(self.tokenizer, files, self.path)

    def _write(self, name: str, text: str) -> None:
        disk.write_atomically(self.path / name, lambda file: file.write(text.encode()), self.path)

    def checkpoint(self, step: int) -> Path:
        """Return the path of the checkpoint after `step` optimizer steps."""
        return self.checkpoints / f"step={step}.safetensors"

    @property
    def has_checkpoint(self) -> bool:
        """Whether there is a checkpoint, good or damaged."""
        return bool(self._named_checkpoints())

    @property
    def pickles(self) -> list[Path]:
        """The checkpoints of earlier versions, which are no longer read."""
        return sorted(self.checkpoints.glob("step=*.ckpt"))

    def known_checkpoints(self) -> list[Path]:
        """Return the paths of all checkpoints, newest first, also of lost ones with only a sum.

        A checkpoint that is being saved, or was when its process died, is left out: it may have a
        sum already, but not its final name.
        """
        folder = self.checkpoints
        sums = {file.name.removesuffix(SUM) for file in folder.glob(f"step=*.safetensors{SUM}")}
        parts = {re.sub(f"{disk.PART}$", "", file.name) for file in folder.glob("*.part")}
        known = {*self._named_checkpoints(), *(folder / name for name in sums - parts)}
        return sorted((path for path in known if step_of(path) >= 0), key=step_of, reverse=True)

    def _named_checkpoints(self) -> list[Path]:
        """Not a user's own files, `best.safetensors` for example: they stay as they are."""
        there = self.checkpoints.glob("step=*.safetensors")
        return [file for file in there if step_of(file) >= 0 and not file.is_dir()]

    def remove_leftovers(self) -> None:
        """Remove unfinished files of killed processes. No process may be saving in the folder."""
        for place in (self.path, self.checkpoints, self.tokenizer):
            for target in disk.remove_leftovers(place, FILE_NAMES):
                if target.suffix == ".safetensors" and not os.path.lexists(target):
                    sum_of(target).unlink(missing_ok=True)


def step_of(checkpoint: Path) -> int:
    """Return the optimizer step in a checkpoint's name; -1 if the name has none."""
    match = re.fullmatch(CHECKPOINT, checkpoint.name)
    return int(match.group(1)) if match else -1


def sum_of(checkpoint: Path) -> Path:
    """Return the path of the file with the checkpoint's SHA-256."""
    return checkpoint.with_name(checkpoint.name + SUM)


def begun_below(home: Path) -> list[RunFolder]:
    """Return the begun runs directly below `home`, oldest settings first."""
    return _by_age(home.glob(f"*/{CONFIG}"))


def done_below(home: Path, levels: int = 1) -> list[RunFolder]:
    """Return the runs that are done, `levels` folders below `home`, oldest summary first."""
    return _by_age(home.glob("*/" * levels + SUMMARY))


def _by_age(files: Iterable[Path]) -> list[RunFolder]:
    there = [file for file in files if file.is_file()]
    return [RunFolder(file.parent) for file in sorted(there, key=lambda file: file.stat().st_mtime)]


def making_behind(cfg: TrainConfig) -> Making | None:
    """Return what made the run in `init_from`; None if there is no such run or no record of it."""
    if cfg.init_from is None:
        return None
    return RunFolder(Path(cfg.init_from).expanduser()).read_making()
