"""Hashes of the code that makes a run's numbers: one per module, of its syntax tree.

Docstrings, comments and layout do not count. Nothing is imported for a hash: imports are followed
in the source, so that planning a sweep gives the same hashes as running it.
"""

import ast
import hashlib
import importlib.util
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path

OURS = "gptattn"
# Model, loss, optimizer and its schedule, sampler: every run's numbers come from these.
COMMON = (
    "gptattn.model.gpt",
    "gptattn.model.block",
    "gptattn.model.kinds",
    "gptattn.model.loss",
    "gptattn.model.decay",
    "gptattn.model.shared_init",
    "gptattn.training.module",
    "gptattn.settings.budget",
    "gptattn.data.sampler",
)
# Imports are followed within these modules, which make numbers, and not into the rest of gptattn.
NUMBERS = (*COMMON, "gptattn.attention", "gptattn.position", "gptattn.optim", "gptattn.weights")


def code_of(targets: Iterable[str], packages: Collection[str] = ()) -> dict[str, str]:
    """Return module -> hash for all code that makes the numbers of a run with these targets.

    `targets` are dotted names, as in a `_target_`. `packages` are further packages in which targets
    may lie; their modules count like ours, and so do helpers of a user's own beside them. An
    installed package counts by its version.
    """
    homes = (*NUMBERS, *packages)
    waiting = [*COMMON, *(_home(*target.rpartition(".")[::2]) for target in targets)]
    found: dict[str, str] = {}
    while waiting:
        module = waiting.pop()
        file, top = _file_of(module), module.partition(".")[0]
        local = top not in (OURS, *sys.stdlib_module_names)
        installed = file is not None and "site-packages" in file.parts and top != OURS
        counts = any(f"{module}.".startswith(f"{home}.") for home in homes)
        if file is None or module in found or not (counts or (local and not installed)):
            continue
        if installed:  # nobody edits it
            found[top] = f"version {version(top)}"
            continue
        found[module] = _hash_of(file)
        waiting += _imports(module, file)
    return dict(sorted(found.items()))


def is_unchanged(code: Mapping[str, str]) -> bool:
    """Return whether every recorded module still has its recorded hash or version."""
    for module, recorded in code.items():
        file = _file_of(module)
        if file is None:
            return False
        if recorded != (
            f"version {version(module)}" if recorded[:8] == "version " else _hash_of(file)
        ):
            return False
    return True


def class_code(kind: type) -> str:
    """Return the class's name and the hashes of the modules that define it and its base classes."""
    files = [_file_of(base.__module__) for base in kind.__mro__ if base is not object]
    return " ".join([kind.__qualname__, *(_hash_of(file) for file in files if file is not None)])


def _file_of(module: str) -> Path | None:
    """Return the module's source file; None if there is no such module or it has no source."""
    top, _, below = module.partition(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    for folder in (spec and spec.submodule_search_locations) or ():
        place = Path(folder, *below.split(".")) if below else Path(folder)
        for file in (place.with_name(f"{place.name}.py"), place / "__init__.py"):
            if file.is_file():
                return file
    own = Path(spec.origin) if spec is not None and spec.origin else None
    return own if own is not None and not below and own.suffix == ".py" else None


def _home(module: str, name: str) -> str:
    """Return the module that defines what `from module import name` imports, through re-exports."""
    if _file_of(f"{module}.{name}") is not None:
        return f"{module}.{name}"
    file = _file_of(module)
    for node in () if file is None else _from_imports(file):
        for alias in node.names:
            if (alias.asname or alias.name) == name and node.module not in (None, module):
                return _home(_absolute(node, module, file), alias.name)
    return module


def _imports(module: str, file: Path) -> Iterator[str]:
    """Yield every module that the file imports, also inside of functions."""
    for node in ast.walk(_tree(file)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
    for node in _from_imports(file):
        yield from (_home(_absolute(node, module, file), alias.name) for alias in node.names)


def _absolute(node: ast.ImportFrom, module: str, file: Path | None) -> str:
    if not node.level:
        return node.module or ""
    package = (
        module if file is not None and file.name == "__init__.py" else module.rpartition(".")[0]
    )
    up = package.split(".")[: len(package.split(".")) - node.level + 1]
    return ".".join([*up, *filter(None, [node.module])])


def _from_imports(file: Path) -> list[ast.ImportFrom]:
    return [node for node in ast.walk(_tree(file)) if isinstance(node, ast.ImportFrom)]


@cache  # the first reading counts: this process has not imported later edits
def _tree(file: Path) -> ast.Module:
    """Return the file's syntax tree without docstrings."""
    tree = ast.parse(file.read_bytes(), filename=str(file))
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    return tree


@cache
def _hash_of(file: Path) -> str:
    return hashlib.sha256(ast.dump(_tree(file)).encode()).hexdigest()[:16]
