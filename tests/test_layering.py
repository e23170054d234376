"""Rooms import only from lower rooms, and Hydra stays where it belongs."""

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import gptattn

PACKAGE = Path(gptattn.__file__).parent

# Low to high: a room imports from itself and those before it. CONTRIBUTING shows the same list.
ROOMS = (
    ("errors", "machine"),
    ("position", "optim"),
    ("attention",),
    ("model",),
    ("data",),
    ("settings",),
    ("build",),
    ("decode", "maps"),
    ("runs",),
    ("weights",),
    ("evaluate",),
    ("training",),
    ("compare",),
    ("sweep",),
    ("cli",),
)


def height(module: str) -> int:
    """The position of the module's room in ROOMS; -1 for the package's own `__init__`."""
    room = (*module.split("."), "")[1]
    heights = [h for h, rooms in enumerate(ROOMS) if room in rooms]
    assert heights or not room, f"{module} is in no room; move it into one"
    return heights[0] if heights else -1


@cache
def modules() -> dict[str, ast.Module]:
    """The syntax tree of every module of the package, by dotted name."""
    found = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = ("gptattn", *file.relative_to(PACKAGE).with_suffix("").parts)
        name = ".".join(parts).removesuffix(".__init__")
        found[name] = ast.parse(file.read_text(encoding="utf-8"))
    return found


def imported(tree: ast.Module) -> Iterator[str]:
    """Yield the dotted name of every import, also of those inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own(name: str) -> str:
    """The module of the package that defines an imported dotted name, or contains it."""
    while name not in modules():
        name = name.rpartition(".")[0]
    return name


def own_imports(module: str) -> set[str]:
    return {own(name) for name in imported(modules()[module]) if name.startswith("gptattn.")}


def foreign(tree: ast.Module) -> set[str]:
    """The top-level names of the imported libraries."""
    return {name.partition(".")[0] for name in imported(tree)} - {"gptattn"}


def test_a_module_imports_from_its_own_room_or_those_before_it():
    above = {(m, name) for m in modules() for name in own_imports(m) if height(name) > height(m)}
    assert not above


def test_modules_do_not_import_each_other_in_a_circle():
    graph = {module: own_imports(module) - {module} for module in modules()}
    assert len(list(TopologicalSorter(graph).static_order())) == len(modules())


def test_hydra_is_known_where_settings_sweeps_and_commands_are():
    knows = {name for name, tree in modules().items() if foreign(tree) & {"hydra", "omegaconf"}}
    assert {name.split(".")[1] for name in knows} == {"cli", "settings", "sweep"}
