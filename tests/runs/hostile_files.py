"""Files in the place of a run's checkpoint."""

import zipfile
from pathlib import Path

from gptattn.runs.checkpoint import step_of


def in_zip(path: Path, entries: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)


def checkpoint_of(run: Path) -> Path:
    """The run's only checkpoint, and no sum beside it: that of a hostile file would fit."""
    *older, newest = sorted((run / "checkpoints").glob("*.ckpt"), key=step_of)
    for path in [*older, *(run / "checkpoints").glob("*.sha256")]:
        path.unlink()
    return newest
