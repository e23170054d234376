"""A run's folder: the one place that knows what lies where in it. It needs no torch and no Hydra.

What is written goes through `disk.write_atomically`; what is read may be somebody else's.
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
from gptattn.settings.config import TrainConfig
from gptattn.settings.identity import Making

# A run writes 2 kB of settings and of summary, but a tokenizer of 65,536 characters has them in
# its settings; of its making it writes about 5 kB.
CONFIG_BYTES, SUMMARY_BYTES, MAKING_BYTES = 1_000_000, 5_000_000, 1_000_000

CONFIG, SUMMARY, ROWS, MAKING = "config.yaml", "summary.json", "metrics.jsonl", "identity.json"
CHECKPOINT, SUM = r"step=(\d+)\.safetensors", ".sha256"
# What a killed process may have left half of, in the folder, its checkpoints' and its tokenizer's.
WRITTEN = "|".join(
    [
        *map(re.escape, (CONFIG, SUMMARY, ROWS, MAKING, *tokenizer_files.FILES)),
        rf"{CHECKPOINT}(?:{re.escape(SUM)})?",
    ]
)


@dataclass(frozen=True)
class RunFolder:
    """A folder that holds a run, or a converted model, or neither yet.

    What reads a file raises OSError where it cannot be read, and ValueError, naming it, where it
    is damaged or too large.
    """

    path: Path

    @property
    def config_file(self) -> Path:
        """The settings, resolved, in plain values. Who has written it has claimed the folder."""
        return self.path / CONFIG

    @property
    def rows_file(self) -> Path:
        """A row of figures a line, added to as they come: the truth."""
        return self.path / ROWS

    @property
    def events_file(self) -> Path:
        """How the names of TensorBoard's files begin: a view of the rows."""
        return self.path / "events.out.tfevents"

    @property
    def summary_file(self) -> Path:
        """The last that a run writes: it is done."""
        return self.path / SUMMARY

    @property
    def making_file(self) -> Path:
        """What made the run, beside its settings."""
        return self.path / MAKING

    @property
    def checkpoints(self) -> Path:
        """The folder of `step=40.safetensors`, each with a `step=40.safetensors.sha256`."""
        return self.path / "checkpoints"

    @property
    def weights_file(self) -> Path:
        """A converted model's weights, in place of checkpoints; no run has one."""
        return self.path / "model.safetensors"

    @property
    def tokenizer(self) -> Path:
        """The folder of the files that the tokenizer needs: where they came from may move."""
        return self.path / tokenizer_files.IN_RUN

    @property
    def maps(self) -> Path:
        """Where the pictures of its attention go, if nobody says otherwise."""
        return self.path / "attention"

    @property
    def console_file(self) -> Path:
        """What a run of a sweep has printed."""
        return self.path / "console.log"

    @property
    def begun(self) -> bool:
        return self.config_file.exists()

    @property
    def done(self) -> bool:
        return self.summary_file.is_file()

    @property
    def done_at(self) -> float:
        """Seconds since 1970. Raises OSError where it is not done."""
        return self.summary_file.stat().st_mtime

    def read_settings(self) -> dict[str, Any]:
        """The settings as plain values, whatever version wrote them; nothing is made of them."""
        try:
            settings = read_yaml(self.config_file, CONFIG_BYTES)
        except yaml.YAMLError as error:
            raise ValueError(f"{CONFIG} is damaged: {' '.join(str(error).split())}") from None
        if not isinstance(settings, dict):
            raise ValueError(f"{CONFIG} holds no settings")
        return settings

    def write_settings(self, cfg: TrainConfig) -> None:
        self._write(CONFIG, yaml.safe_dump(asdict(cfg), sort_keys=False, allow_unicode=True))

    def read_summary(self) -> dict[str, Any]:
        """All that the summary holds, also of a run that says it is not done."""
        text = read_bytes(self.summary_file, SUMMARY_BYTES)
        try:
            summary = json.loads(text.decode())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{SUMMARY} is damaged or half-written: {error}") from None
        if not isinstance(summary, dict):
            raise ValueError(f"{SUMMARY} is damaged: it holds no names")
        return summary

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        self._write(SUMMARY, json.dumps(summary, indent=2, ensure_ascii=False) + "\n")

    def finished(self) -> dict[str, Any] | None:
        """The summary of a run that is done; None where there is none, or half of one."""
        try:
            summary = self.read_summary()
        except (OSError, ValueError):
            return None
        return summary if summary.get("status") == "done" else None

    def final_loss(self) -> float | None:
        """The validation loss that the summary tells; None where it tells no finite one."""
        try:
            loss = float(self.read_summary()["metrics"]["val/loss"])
        except (OSError, ValueError, LookupError, TypeError, OverflowError):
            return None
        return loss if math.isfinite(loss) else None

    def read_making(self) -> Making | None:
        """What made the run; None where it says nothing that can be read: unknown."""
        try:
            text = read_bytes(self.making_file, MAKING_BYTES)
            return msgspec.json.decode(text, type=Making)
        except (OSError, ValueError, msgspec.MsgspecError):
            return None

    def write_making(self, making: Making) -> None:
        self._write(MAKING, json.dumps(asdict(making), indent=1) + "\n")

    def write_tokenizer(self, files: Mapping[str, str]) -> None:
        """Keep the tokenizer's files, name -> text, as they are."""
        tokenizer_files.write(self.tokenizer, files, self.path)

    def _write(self, name: str, text: str) -> None:
        disk.write_atomically(self.path / name, lambda file: file.write(text.encode()), self.path)

    def checkpoint(self, step: int) -> Path:
        """The file of the state after `step` steps."""
        return self.checkpoints / f"step={step}.safetensors"

    @property
    def has_checkpoint(self) -> bool:
        return any(self.checkpoints.glob("*.safetensors"))

    @property
    def pickles(self) -> list[Path]:
        """Checkpoints of earlier versions, which are no longer read."""
        return sorted(self.checkpoints.glob("step=*.ckpt"))

    def known_checkpoints(self) -> list[Path]:
        """Every checkpoint that is, or by its sum should be, there; the newest first.

        One that is being saved, or was when its process died, has a sum and no name yet: it is
        not among them.
        """
        folder = self.checkpoints
        names = {file.name for file in folder.glob("*.safetensors") if not file.is_dir()}
        sums = {file.name.removesuffix(SUM) for file in folder.glob(f"*.safetensors{SUM}")}
        parts = {re.sub(f"{disk.PART}$", "", file.name) for file in folder.glob("*.part")}
        names |= sums - parts
        return sorted((folder / name for name in names), key=step_of, reverse=True)

    def remove_leftovers(self) -> None:
        """Remove what a killed process has left. Nobody may be saving in the folder meanwhile."""
        for place in (self.path, self.checkpoints, self.tokenizer):
            for target in disk.remove_leftovers(place, WRITTEN):
                if target.suffix == ".safetensors" and not os.path.lexists(target):
                    sum_of(target).unlink(missing_ok=True)


def step_of(checkpoint: Path) -> int:
    """The optimizer step in a checkpoint's name; -1 for another name."""
    match = re.fullmatch(CHECKPOINT, checkpoint.name)
    return int(match.group(1)) if match else -1


def sum_of(checkpoint: Path) -> Path:
    """Where its SHA-256 is noted."""
    return checkpoint.with_name(checkpoint.name + SUM)


def begun_below(home: Path) -> list[RunFolder]:
    """The runs right below `home`, the one whose settings are newest last."""
    return _by_age(home.glob(f"*/{CONFIG}"))


def done_below(home: Path, levels: int = 1) -> list[RunFolder]:
    """The runs that are done so many levels below `home`; the newest last."""
    return _by_age(home.glob("*/" * levels + SUMMARY))


def _by_age(files: Iterable[Path]) -> list[RunFolder]:
    there = [file for file in files if file.is_file()]
    return [RunFolder(file.parent) for file in sorted(there, key=lambda file: file.stat().st_mtime)]


def making_behind(cfg: TrainConfig) -> Making | None:
    """What made the run in `init_from`; None where that is no run, or one that does not say."""
    if cfg.init_from is None:
        return None
    return RunFolder(Path(cfg.init_from).expanduser()).read_making()
