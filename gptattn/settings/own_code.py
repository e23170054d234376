"""The user's own modules: `mine.py` in the working directory, or in `--config-dir`."""

import importlib.util
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_trusted: list[Path] = []  # absolute; besides the working directory


def use_folders(folders: Iterable[str | Path] = (), *, trusted: bool = True) -> None:
    """Let modules be imported from the working directory and from these folders.

    They come last on sys.path, so that a user's file never hides a library. Targets from `trusted`
    folders need no allow_targets.
    """
    for folder in (Path.cwd(), *map(Path, folders)):
        folder = folder.absolute()
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
        if trusted and folder not in (Path.cwd(), *_trusted):
            _trusted.append(folder)


def use_recorded(settings: Mapping[str, Any], *, allowed: bool = False) -> None:
    """Call `use_folders` on the recorded folders that lie in the working directory.

    `allowed`: also import from the other folders, if allow_targets names the module.
    """
    recorded = [Path(str(folder)) for folder in settings.get("code_folders") or ()]
    use_folders(folder for folder in recorded if folder.is_relative_to(Path.cwd()))
    if allowed:
        use_folders(recorded, trusted=False)


def find_folder(name: str) -> Path | None:
    """Return the trusted folder that holds the module of a dotted name; None: none does.

    Imports nothing. A library is never in one, even if its environment lies in such a folder.
    """
    top = name.partition(".")[0]
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
    for folder in (Path.cwd(), *_trusted):
        paths = (f"{folder / top}.py", f"{folder / top}", f"{folder / top / '__init__.py'}")
        if any(place in paths for place in places):
            return folder
    return None
