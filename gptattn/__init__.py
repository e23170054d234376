"""gptattn: which attention should my GPT use, what does it cost, and how sure are we?"""

from pathlib import Path

__version__ = "0.1.0"


def command(name: str) -> str:
    """How a user calls `train`, `compare` and the like: by its file, or as it was installed."""
    if (Path(__file__).parents[1] / "train.py").exists():
        return "python train.py" if name == "train" else f"python scripts/{name}.py"
    return f"gptattn-{name.replace('_', '-')}"
