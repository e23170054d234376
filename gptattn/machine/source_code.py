"""Hashes of the code that makes a run's numbers: one per module, of its syntax tree.

Docstrings, comments and layout do not count. Nothing is imported for a hash: imports are followed
in the source, so that planning a sweep gives the same hashes as running it.
"""

import ast
import hashlib
import importlib.util
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

OURS = "gptattn"
# Model, loss, optimizer and its schedule, sampler: every run's numbers come from these. Not
# `model.stacked` and `training.vectorized`: a run that shares its model has the numbers that it has
# alone, and its settings do not say whether it did.
COMMON = (
    "gptattn.model.gpt",
    "gptattn.model.block",
    "gptattn.model.kinds",
    "gptattn.model.loss",
    "gptattn.model.decay",
    "gptattn.model.shared_init",
    "gptattn.training.module",
    "gptattn.training.step_guard",
    "gptattn.settings.budget",
    "gptattn.data.sampler",
)
# Imports are followed within these modules, which make numbers, and not into the rest of gptattn.
# `weights` is among them as the target of runs that start from other weights; none of the other
# modules imports it.
NUMBERS = (*COMMON, "gptattn.attention", "gptattn.position", "gptattn.optim", "gptattn.weights")
DIGITS = 16  # hexadecimal digits of a hash


def code_of(targets: Iterable[str], packages: Collection[str] = ()) -> dict[str, str]:
    """Return module -> hash for all code that makes the numbers of a run with these targets.

    `targets` are dotted names, as in a `_target_`. `packages` are further packages in which targets
    may lie; their modules count like ours. An installed package counts by its version.
    """
    homes = (*NUMBERS, *packages)
    waiting = [*COMMON, *(_home_of_name(target.replace(":", ".")) for target in targets)]
    found: dict[str, str] = {}
    while waiting:
        module = waiting.pop()
        if module in found or not (_within(module, homes) or _is_local(module)):
            continue
        if (release := _release(module)) is not None:
            found[module.partition(".")[0]] = release
            continue
        file = _file_of(module)
        if file is not None:
            found[module] = _hash_of(file)
            waiting += (_our_imports if _within(module, (OURS,)) else _imports)(module, file)
    return dict(sorted(found.items()))


def class_code(kind: type) -> str:
    """Return the class's name and the hashes of the modules that define it and its base classes."""
    files = [_file_of(base.__module__) for base in kind.__mro__ if base is not object]
    return " ".join([kind.__qualname__, *(_hash_of(file) for file in files if file is not None)])


def other_code(numbers: Collection[str], packages: Collection[str] = ()) -> dict[str, str]:
    """Return module -> hash for other imported modules, of ours or of `packages`.

    Modules in `numbers`, and those of installed packages, are left out.
    """
    found = {}
    for module in [name for name in sys.modules if _within(name, (OURS, *packages))]:
        file = _file_of(module)
        if module not in numbers and file is not None and _release(module) is None:
            found[module] = _hash_of(file)
    return dict(sorted(found.items()))


def _is_local(module: str) -> bool:
    """Return whether the module is a user's own, such as a helper beside a variant.

    It is then not ours, not installed, and not part of Python.
    """
    top = module.partition(".")[0]
    file = _file_of(module)
    if top == OURS or top in sys.stdlib_module_names or file is None:
        return False
    return not _is_installed(file)


def is_unchanged(code: Mapping[str, str]) -> bool:
    """Return whether every recorded module still has its recorded hash or version."""
    for module, recorded in code.items():
        file = _file_of(module)
        if (_release(module) or (file and _hash_of(file))) != recorded:
            return False
    return True


def _within(module: str, homes: Iterable[str]) -> bool:
    return any(module == home or module.startswith(f"{home}.") for home in homes)


def _release(module: str) -> str | None:
    """Return `version 1.2` for a module of an installed package; None for a source file.

    Nobody edits an installed package, so its version stands for its code.
    """
    package = module.partition(".")[0]
    file = _file_of(package)
    if package == OURS or file is None or not _is_installed(file):
        return None
    try:
        return f"version {version(package)}"
    except PackageNotFoundError:
        return None


def _is_installed(file: Path) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(file.parts)


def _file_of(module: str) -> Path | None:
    """Return the module's source file; None if there is no such module or it has no source."""
    top, _, below = module.partition(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if not below and spec.origin and spec.origin.endswith(".py"):
        return Path(spec.origin)
    for folder in spec.submodule_search_locations or ():
        place = Path(folder, *below.split("."))
        for file in (place.with_name(f"{place.name}.py"), place / "__init__.py"):
            if below and file.is_file():
                return file
    return None


def _home_of_name(name: str) -> str:
    """Return the module that defines `package.module.Class`, even if other modules re-export it."""
    if _file_of(name) is not None:
        return name
    module, _, attribute = name.rpartition(".")
    return _home(module, attribute) if module else name


def _home(module: str, name: str, depth: int = 0) -> str:
    """Return the module that defines what `from module import name` imports."""
    if _file_of(f"{module}.{name}") is not None:
        return f"{module}.{name}"
    file = _file_of(module)
    if file is None or depth > 20:  # a circle of re-exports
        return module
    for source, given, bound in _from_imports(module, file):
        if bound == name:
            return _home(source, given, depth + 1)
    return module


@cache  # ours stay where they are, and every run asks; a user's may lie elsewhere the next time
def _our_imports(module: str, file: Path) -> frozenset[str]:
    return frozenset(_imports(module, file))


def _imports(module: str, file: Path) -> Iterator[str]:
    """Yield every module that the file imports, also inside of functions."""
    yield from _parsed(file).imports
    yield from (_home(source, given) for source, given, _ in _from_imports(module, file))


def _from_imports(module: str, file: Path) -> Iterator[tuple[str, str, str]]:
    """Yield (module, name there, name here) of each `from module import name`."""
    for node in _parsed(file).from_imports:
        source = node.module or ""
        if node.level:
            package = module if file.name == "__init__.py" else module.rpartition(".")[0]
            up = package.split(".")[: len(package.split(".")) - node.level + 1]
            source = ".".join([*up, *filter(None, [node.module])])
        for alias in node.names:
            yield source, alias.name, alias.asname or alias.name


def _hash_of(file: Path) -> str:
    return _parsed(file).hash


@dataclass(frozen=True)
class _Source:
    """What is kept of a parsed file, because its whole tree is large."""

    imports: list[str]
    from_imports: list[ast.ImportFrom]
    hash: str


@cache  # the first reading counts: this process has not imported later edits
def _parsed(file: Path) -> _Source:
    tree = ast.parse(file.read_bytes(), filename=str(file))
    words: list[str] = []
    _add_words(tree, words)
    text = "\0".join([*words, ""]).encode("utf-8", errors="backslashreplace")
    nodes = list(ast.walk(tree))
    return _Source(
        [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names],
        [node for node in nodes if isinstance(node, ast.ImportFrom)],
        hashlib.sha256(text).hexdigest()[:DIGITS],
    )


def _add_words(node: object, words: list[str]) -> None:
    """Add node types and values as strings. Empty fields are skipped: newer Pythons add some."""
    if isinstance(node, ast.AST):
        words.append(f"({type(node).__name__}")
        for name, value in ast.iter_fields(node):
            if name == "body" and isinstance(value, list) and _is_text(value[:1]):
                value = value[1:]  # a docstring
            if value not in (None, []):
                words.append(name)
                _add_words(value, words)
        words.append(")")
    elif isinstance(node, list):
        words.append(f"[{len(node)}")
        for child in node:
            _add_words(child, words)
    else:
        words.append(repr(node))


def _is_text(nodes: list[ast.AST]) -> bool:
    return any(
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for node in nodes
    )
