"""Imports never go upstream, and heavy or risky libraries stay where they belong."""

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import gptattn
from gptattn.compose import CONF

PACKAGE = Path(gptattn.__file__).parent

# Low to high. `name.*` stands for a package and all that is in it.
LAYERS = (
    ("gptattn", "errors", "cpus", "template", "stopping", "archive"),
    ("untrusted",),
    ("lock", "disk"),
    ("config", "hub", "targets", "source_code"),
    ("identity",),
    (
        "data",
        "data.corpus",
        "data.text",
        "data.text_file",
        "data.token_files",
        "data.tokenizer",
        "data.bpe",
        "data.bpe_files",
        "data.tokens",
        "data.sampler",
    ),
    ("attention.*", "position.*", "waiting"),
    ("loss", "gpt"),
    (
        "sampling",
        "arguments",
        "cost",
        "build",
        "budget",
        "generate",
        "device",
        "heatmap",
        "prompt",
        "text_stream",
        "checkpoint",
    ),
    ("saved", "gpt2"),
    ("convert", "match", "module", "recorder", "data.datamodule"),
    ("callbacks", "watchdog", "attention_log", "console", "summary", "saving"),
    ("resume_state",),
    ("resume",),
    ("progress",),
    ("run", "precheck", "compare.*", "maps.*"),
    (
        "sweep",
        "sweep.ledger",
        "sweep.plan",
        "sweep.processes",
        "sweep.progress",
        "sweep.estimate",
        "sweep.trial",
        "sweep.uptrain",
        "sweep.checks",
        "sweep.design",
        "sweep.ending",
    ),
    ("sweep.run", "overlay"),
    ("compose", "resume_settings"),
    ("planning",),
    ("cli",),
    ("script",),
    ("sweep.worker", "commands.*"),
)


def full_name(entry: str) -> str:
    return entry if entry == "gptattn" else f"gptattn.{entry}"


def layer(module: str) -> int:
    """The module's layer. Raises KeyError for one that the table lacks."""
    for height, entries in enumerate(LAYERS):
        for entry in map(full_name, entries):
            package = entry.removesuffix(".*")
            if module == package or (entry != package and module.startswith(f"{package}.")):
                return height
    raise KeyError(f"{module} is in no layer; add it to LAYERS")


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of the package, by its dotted name."""
    found = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = ("gptattn", *file.relative_to(PACKAGE).with_suffix("").parts)
        name = ".".join(parts).removesuffix(".__init__")
        found[name] = ast.parse(file.read_text(encoding="utf-8"))
    return found


def imported(tree: ast.Module) -> Iterator[str]:
    """The dotted name of everything that is imported, also inside of functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own(name: str) -> str:
    """The module of the package that an imported name lies in."""
    while name not in modules():
        name = name.rpartition(".")[0]
    return name


def own_imports(module: str) -> set[str]:
    return {own(name) for name in imported(modules()[module]) if name.startswith("gptattn.")}


def foreign(tree: ast.Module) -> set[str]:
    """The top-level names of the libraries that are imported."""
    return {name.partition(".")[0] for name in imported(tree)} - {"gptattn"}


def test_the_table_names_only_modules_that_exist() -> None:
    entries = {full_name(entry).removesuffix(".*") for height in LAYERS for entry in height}
    assert entries <= modules().keys()


@pytest.mark.parametrize("module", modules())
def test_a_module_imports_from_its_own_layer_or_below(module: str) -> None:
    above = {name for name in own_imports(module) if layer(name) > layer(module)}
    assert not above


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    graph = {module: own_imports(module) - {module} for module in modules()}
    assert len(list(TopologicalSorter(graph).static_order())) == len(modules())


@pytest.mark.parametrize("module", modules())
def test_only_the_command_line_knows_hydra(module: str) -> None:
    if module not in (
        "gptattn.cli",
        "gptattn.compose",
        "gptattn.overlay",
        "gptattn.planning",
        "gptattn.resume_settings",
    ):
        assert not foreign(modules()[module]) & {"hydra", "omegaconf"}


def test_what_reads_run_folders_imports_neither_torch_nor_lightning() -> None:
    reached: set[str] = set()
    open_ends = {name for name in modules() if name.startswith("gptattn.compare")}
    while open_ends:
        module = open_ends.pop()
        reached.add(module)
        # Importing a.b.c runs a and a.b as well.
        parents = {module.rpartition(".")[0]} - {""}
        open_ends |= (own_imports(module) | parents) - reached
    assert len(reached) > 3
    for module in reached:
        assert not foreign(modules()[module]) & {"torch", "lightning", "hydra", "omegaconf"}


def reached_from(module: str) -> set[str]:
    """All modules of the package that importing one of them imports."""
    reached, open_ends = set[str](), {module}
    while open_ends:
        module = open_ends.pop()
        reached.add(module)
        open_ends |= own_imports(module) - reached
    return reached


@pytest.mark.parametrize("module", ["gptattn.precheck", "gptattn.sweep.run"])
def test_checking_a_command_waits_for_no_lightning(module: str) -> None:
    # Its import takes longer than torch's, and a mistake should be told at once.
    reached = reached_from(module)
    assert {"gptattn.gpt", "gptattn.checkpoint"} <= reached
    for module in reached:
        assert "lightning" not in foreign(modules()[module])


@pytest.mark.parametrize("module", modules())
def test_only_the_checkpoint_module_reads_with_torch_load(module: str) -> None:
    tree = modules()[module]
    uses = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr == "load"
        and isinstance(node.value, ast.Name)
        and node.value.id == "torch"
    ]
    assert len(uses) == (module == "gptattn.checkpoint")
    assert "torch.load" not in imported(tree)
    assert "pickle" not in foreign(tree) or module == "gptattn.checkpoint"


def test_the_front_door_only_opens() -> None:
    tree = ast.parse((CONF.parent / "train.py").read_text(encoding="utf-8"))
    assert list(imported(tree)) == ["gptattn.cli.main"]
