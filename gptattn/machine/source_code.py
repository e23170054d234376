"""Hashes of the code behind a run's numbers: one per module, of its syntax tree.

Docstrings, comments, layout and the messages of `raise`, `assert` and warnings do not count.
Hashing imports nothing: it follows imports in the source, so that planning a sweep gives the same
hashes as running it.
"""

import ast
import hashlib
import importlib.util
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any, NamedTuple

OURS = "gptattn"
VERSION = "2"  # of what a hash covers: hashes of other versions never agree
# Model, loss, optimizer and its schedule, sampler: every run's numbers come from these.
COMMON = (
    "gptattn.model.gpt",
    "gptattn.model.loss",
    "gptattn.model.shared_init",
    "gptattn.training.module",
    "gptattn.settings.budget",
    "gptattn.data.sampler",
)
# Imports are followed within these modules, which make numbers, but not into the rest of gptattn.
NUMBERS = (*COMMON, "gptattn.attention", "gptattn.position", "gptattn.optim", "gptattn.weights")


class Source(NamedTuple):
    """The hash and the imports of a module."""

    hash: str  # of its syntax tree
    imports: list[tuple[str, str, str]]  # module, name, alias; `import module` has no name


def hash_code(targets: Iterable[str], packages: Collection[str] = ()) -> dict[str, str]:
    """Return module -> hash for all code that makes the numbers of a run with these targets.

    `targets` are dotted names, as in a `_target_`. `packages` are further packages in which targets
    may lie; their modules count like ours, and so do the user's own helper modules. An installed
    package counts by its version.
    """
    homes = (*NUMBERS, *packages)
    # Modules, and names imported from them; a name counts as the module that defines it.
    waiting = [(module, "") for module in COMMON]
    waiting += [(home, name) for home, _, name in (target.rpartition(".") for target in targets)]
    seen: set[tuple[str, str]] = set()
    hashes: dict[str, str] = {}
    while waiting:
        module, name = waiting.pop()
        if (module, name) in seen:
            continue
        seen.add((module, name))
        if name and _file_of(f"{module}.{name}") is not None:
            module, name = f"{module}.{name}", ""
        file, top = _file_of(module), module.partition(".")[0]
        source = None if file is None else read_source(module, file)
        imports = [] if source is None else source.imports
        exported = [(other, original) for other, original, alias in imports if alias == name != ""]
        if not exported and name and file is not None and file.stem == "__init__":
            # A package may look up its classes in the files below it.
            exported = [(home, "") for home in (find_class(module, file.parent, name),) if home]
        if exported:
            waiting += exported
            continue
        counts = any(f"{module}.".startswith(f"{home}.") for home in homes)
        if source is not None and (counts or top != OURS):
            hashes[module] = source.hash
            waiting += [(other, original) for other, original, _ in imports]
        elif counts and (installed := hash_of(top)) is not None:
            hashes[top] = installed
    return dict(sorted(hashes.items()))


def find_class(package: str, folder: Path, name: str) -> str | None:
    """Return the module, one subpackage below a package, whose source defines the class `name`.

    `folder`: the package's. Return None if there is none. Nothing is imported.
    """
    for file in sorted(folder.glob("*/*.py")):
        if re.search(rf"^class {name}\b", file.read_text(encoding="utf-8"), re.MULTILINE):
            return f"{package}.{file.parent.name}.{file.stem}"
    return None


def is_unchanged(code: Mapping[str, str]) -> bool:
    """Return whether every recorded module still has its recorded hash or version."""
    return all(hash_of(module) == recorded for module, recorded in code.items())


def class_code(kind: type) -> str:
    """Return the class's name and the hashes of the modules that define it and its base classes."""
    hashes = [hash_of(base.__module__) for base in kind.__mro__]
    return " ".join([kind.__qualname__, *filter(None, hashes)])


def hash_of(module: str) -> str | None:
    """Return the hash of a module, or the version of its package if that is installed.

    Return None for a module of the standard library, and for one that does not exist.
    """
    file, top = _file_of(module), module.partition(".")[0]
    if file is not None:
        return read_source(module, file).hash
    installed = None if top in sys.stdlib_module_names else version_of(top)
    return None if installed is None else f"version {installed}"


@cache  # it reads what every distribution installs, which takes 0.3 s
def version_of(package: str) -> str | None:
    """Return the version of the distribution that installed a package; None: none did."""
    owners = packages_distributions().get(package)
    return version(owners[0]) if owners else None


def _file_of(module: str) -> Path | None:
    """Return the source file of a module that somebody may edit.

    Return None for a module of the standard library or of an installed package, and for one that
    does not exist or has no source.
    """
    top, *below = module.split(".")
    if top in sys.stdlib_module_names:
        return None
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    files = [] if below or spec is None or spec.origin is None else [Path(spec.origin)]
    for folder in (spec and spec.submodule_search_locations) or ():
        place = Path(folder, *below)
        files += [place / "__init__.py", place.with_name(f"{place.name}.py")]
    for file in files:
        if file.suffix == ".py" and file.is_file():
            return None if "site-packages" in file.parts and top != OURS else file
    return None


@cache  # the first reading counts: this process has not imported later edits
def read_source(module: str, file: Path) -> Source:
    """Return the hash of a module's file, and all that it imports, even inside functions."""
    tree = ast.parse(file.read_bytes(), filename=str(file))
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    imports: list[tuple[str, str, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if ast.get_docstring(node, clean=False) is not None:
                node.body = node.body[1:]
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            node.exc.args, node.exc.keywords = [], []
        elif isinstance(node, ast.Assert):
            node.msg = None
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("warnings.warn", "warn"):
            node.args, node.keywords = [], []
        elif isinstance(node, ast.Import):
            imports += [(alias.name, "", "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            dots = "." * node.level
            other = importlib.util.resolve_name(f"{dots}{node.module or ''}", package)
            imports += [(other, alias.name, alias.asname or alias.name) for alias in node.names]
    return Source(hashlib.sha256(f"{VERSION} {_dump(tree)}".encode()).hexdigest()[:16], imports)


def _dump(node: Any) -> str:
    """Return a syntax tree as text.

    Empty fields are left out, since versions of Python differ in these.
    """
    if isinstance(node, list):
        return f"[{','.join(map(_dump, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = ((name, value) for name, value in ast.iter_fields(node) if value not in (None, []))
    return f"{type(node).__name__}({','.join(f'{name}={_dump(value)}' for name, value in fields)})"
