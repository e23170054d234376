"""Rooms import only from lower rooms, and heavy or risky libraries stay where they belong."""

import ast
import itertools
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import gptattn
from gptattn.settings.compose import CONF

PACKAGE = Path(gptattn.__file__).parent

# Low to high: a room imports from itself and those before it. CONTRIBUTING shows the same list.
ROOMS = (
    ("errors", "machine"),
    ("position", "optim"),
    ("attention",),
    ("model",),
    ("data",),
    ("settings",),
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
            assert node.module is not None
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


def reached_from(*starts: str) -> set[str]:
    """All modules of the package that importing these imports, directly or not."""
    reached, open_ends = set[str](), {*starts}
    while open_ends:
        module = open_ends.pop()
        reached.add(module)
        # Importing a.b.c runs a and a.b as well.
        parents = {module.rpartition(".")[0]} - {""}
        open_ends |= (own_imports(module) | parents) - reached
    return reached


def test_the_package_holds_its_rooms_and_nothing_else() -> None:
    held = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert held - {"__pycache__", "conf"} == {"__init__", *itertools.chain(*ROOMS)}


def test_contributing_shows_the_same_list() -> None:
    page = (CONF.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert " < ".join(", ".join(rooms) for rooms in ROOMS) in " ".join(page.split())


def test_a_module_imports_from_its_own_room_or_those_before_it() -> None:
    above = {(m, name) for m in modules() for name in own_imports(m) if height(name) > height(m)}
    assert not above


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    graph = {module: own_imports(module) - {module} for module in modules()}
    assert len(list(TopologicalSorter(graph).static_order())) == len(modules())


def test_hydra_is_known_where_settings_sweeps_and_commands_are() -> None:
    knows = {name for name, tree in modules().items() if foreign(tree) & {"hydra", "omegaconf"}}
    assert {name.split(".")[1] for name in knows} == {"cli", "settings", "sweep"}


# Importing lightning takes longer than importing torch; a mistake should be reported at once.
@pytest.mark.parametrize(
    ("starts", "without"),
    [
        (["gptattn.compare"], {"torch", "lightning"}),
        (["gptattn.runs.folder", "gptattn.runs.rows"], {"torch", "lightning"}),
        (["gptattn.training.preflight", "gptattn.sweep.plan"], {"lightning"}),
    ],
    ids=["comparisons", "run folders", "checks"],
)
def test_what_should_be_quick_imports_no_heavy_library(
    starts: list[str], without: set[str]
) -> None:
    found = {start: [m for m in modules() if m.startswith(start)] for start in starts}
    assert all(found.values())
    reached = reached_from(*itertools.chain(*found.values()))
    assert len(reached) > 3
    for module in reached:
        assert not foreign(modules()[module]) & without, module


def test_nothing_reads_or_writes_a_pickle() -> None:
    for module, tree in modules().items():
        names = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert not {"torch.load", "torch.save"} & {*names, *imported(tree)}, module
        assert "pickle" not in foreign(tree), module
