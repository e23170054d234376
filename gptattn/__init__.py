"""gptattn: which attention should my GPT use, what does it cost, and how sure are we?

Subpackages import only from earlier ones: errors, machine < position, optim < attention < model <
data < settings < build < decode, maps < runs < weights < evaluate < training < compare < sweep
< cli.
"""

import os
from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

# How often a waiting thread spins before it sleeps; libgomp reads it when torch is loaded. On a
# busy machine, the default of 300,000 takes time from the thread it waits for (docs/speed.md).
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

# The package's Python API, and the module of each name. Modules are imported on first use, because
# pandas and torch take seconds.
_HOMES = {
    "build_layers": "gptattn.build.model",
    "compare": "gptattn.compare",  # a subpackage that can be called
    "lm_eval_model": "gptattn.evaluate.harness",
    "load_curves": "gptattn.compare.curves",
    "load_run": "gptattn.runs.load",
    "load_runs": "gptattn.compare.table",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = import_module(_HOMES[name])
    return getattr(home, name, home)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


def find_source_tree() -> Path | None:
    """Return the root of the source tree, or None if the package was installed."""
    folder = Path(__file__).parents[1]
    return folder if (folder / "train.py").exists() else None


def command(name: str) -> str:
    """Return what a user types here for `train`, `compare` and the other commands."""
    if name == "train" and Path.cwd() == find_source_tree():
        return "python train.py"
    return f"gptattn-{name.replace('_', '-')}"
