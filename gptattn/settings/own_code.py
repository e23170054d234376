"""The user's own modules: `mine.py` beside where the command is typed, or in `--config-dir`."""

import importlib.util
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_given: list[Path] = []  # absolute; beside the working directory


def use_folders(folders: Iterable[str | Path] = (), *, trusted: bool = True) -> None:
    """Let modules be imported from the working directory and from these folders.

    They come last on sys.path, so that no file of the user's hides a library. Targets from
    `trusted` folders need no allow_targets.
    """
    for folder in (Path.cwd(), *map(Path, folders)):
        folder = folder.absolute()
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
        if trusted and folder not in (Path.cwd(), *_given):
            _given.append(folder)


def use_recorded(settings: Mapping[str, Any], *, allowed: bool = False) -> None:
    """Do so with the folders in a run's settings that lie in the working directory.

    `allowed`: modules may come from the others as well, as far as allow_targets names them.
    """
    recorded = [Path(str(folder)) for folder in settings.get("code_folders") or ()]
    use_folders(folder for folder in recorded if folder.is_relative_to(Path.cwd()))
    if allowed:
        use_folders(recorded, trusted=False)


def find_folder(name: str) -> Path | None:
    """Return the trusted folder that holds the module of a dotted name; None: none does.

    Imports nothing. A library counts as a library, wherever its environment lies.
    """
    top = name.partition(".")[0]
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
    for folder in (Path.cwd(), *_given):
        own = (f"{folder / top}.py", f"{folder / top}", f"{folder / top / '__init__.py'}")
        if any(place in own for place in places):
            return folder
    return None
