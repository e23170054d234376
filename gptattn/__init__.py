"""gptattn: which attention should my GPT use, what does it cost, and how sure are we?"""

from pathlib import Path

__version__ = "0.1.0"


def source_tree() -> Path | None:
    """The folder of the source tree that this is; None where it was installed."""
    folder = Path(__file__).parents[1]
    return folder if (folder / "train.py").exists() else None


def command(name: str) -> str:
    """How a user calls `train`, `compare` and the like: by its file, or as it was installed."""
    if source_tree() is not None:
        return "python train.py" if name == "train" else f"python scripts/{name}.py"
    return f"gptattn-{name.replace('_', '-')}"
