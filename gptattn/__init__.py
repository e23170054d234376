"""gptattn: which attention should my GPT use, what does it cost, and how sure are we?"""

from pathlib import Path

__version__ = "0.1.0"


def find_source_tree() -> Path | None:
    """Return the root of the source tree, or None if the package was installed."""
    folder = Path(__file__).parents[1]
    return folder if (folder / "train.py").exists() else None


def command(name: str) -> str:
    """Return how a user calls `train`, `compare` and the like: a script or an installed command."""
    if find_source_tree() is not None:
        return "python train.py" if name == "train" else f"python scripts/{name}.py"
    return f"gptattn-{name.replace('_', '-')}"
