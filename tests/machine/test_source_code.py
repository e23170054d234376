"""Hashes of the syntax trees of the modules from which a run's numbers come."""

import re
import sys
from pathlib import Path

import pytest

import gptattn
from gptattn.machine import source_code
from gptattn.machine.source_code import code_of, is_unchanged, other_code

VARIANT = '''"""A variant."""
from gptattn.attention import GroupedQueryAttention
from .helper import shift

class Mine(GroupedQueryAttention):
    """Shifts nothing."""
    def project(self, x):
        # why
        return shift(super().project(x))
'''
HELPER = "def shift(x):\n    return x\n"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package whose __init__ re-exports the variant of its module `variant`."""
    folder = tmp_path / "mypackage"
    folder.mkdir()
    (folder / "__init__.py").write_text("from mypackage.variant import Mine\nimport json\n")
    (folder / "variant.py").write_text(VARIANT)
    (folder / "helper.py").write_text(HELPER)
    (folder / "other.py").write_text("A = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    source_code._parsed.cache_clear()
    return folder


def code(target: str = "mypackage.Mine") -> dict[str, str]:
    return code_of([target], ["mypackage"])


def edited(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    source_code._parsed.cache_clear()  # another process would start without a cache


def test_a_variant_counts_with_its_bases_its_helpers_and_what_all_runs_share(package: Path) -> None:
    names = set(code())
    assert {"mypackage.variant", "mypackage.helper", "gptattn.attention.gqa"} <= names
    assert {"gptattn.attention.split", "gptattn.attention.core", "gptattn.attention.base"} <= names
    assert {
        "gptattn.model.gpt",
        "gptattn.model.loss",
        "gptattn.training.module",
        "gptattn.data.sampler",
    } <= names
    # The package that re-exports it, another variant, and the sweep do not affect its numbers.
    assert not names & {
        "mypackage",
        "mypackage.other",
        "gptattn.attention.mha",
        "gptattn.settings.config",
    }


def test_every_module_that_the_model_is_made_of_counts() -> None:
    modules, waiting = set[str](), ["gptattn.model.gpt"]
    while waiting:
        modules.add(module := waiting.pop())
        source = Path(*module.split(".")).with_suffix(".py")
        text = (Path(gptattn.__file__).parents[1] / source).read_text(encoding="utf-8")
        imported = set(re.findall(r"(?:from|import) (gptattn\.model\.\w+)", text))
        waiting += imported - modules
    assert {"gptattn.model.block", "gptattn.model.loss"} < modules
    assert modules <= code_of(["gptattn.attention.MultiHeadAttention"]).keys()


@pytest.mark.parametrize("target", ["mypackage.Mine", "mypackage.variant.Mine"])
def test_the_same_class_by_another_name_has_the_same_code(package: Path, target: str) -> None:
    assert code(target) == code()


def test_docstrings_comments_and_layout_make_no_other_code(package: Path) -> None:
    before = code()
    edited(package / "variant.py", "# why", "# why not\n")
    edited(package / "variant.py", '"""Shifts nothing."""', '"""Other words."""')
    edited(package / "variant.py", "shift(super().project(x))", "shift(\n  super().project(x) )")
    assert code() == before


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("variant.py", "return shift(super().project(x))", "return super().project(x)"),
        ("helper.py", "return x", "return 2 * x"),
        ("helper.py", "return x", "return 'x'"),
        ("variant.py", "class Mine", "A = None\nclass Mine"),
    ],
)
def test_a_changed_statement_makes_other_code(package: Path, file: str, old: str, new: str) -> None:
    before = code()
    edited(package / file, old, new)
    changed = {name for name, value in code().items() if before.get(name) != value}
    assert changed == {f"mypackage.{file.removesuffix('.py')}"}


def test_a_module_that_is_not_there_or_a_circle_of_exports_is_no_error(package: Path) -> None:
    (package / "__init__.py").write_text("from mypackage import Mine\nimport missing.part\n")
    assert "mypackage" in code()
    assert "gptattn.model.gpt" in code_of(["missing.Class"], ["missing"])


def test_an_installed_package_counts_by_its_version() -> None:
    from importlib.metadata import version

    found = code_of(["scipy.optimize.OptimizeResult"], ["scipy"])
    assert found["scipy"] == f"version {version('scipy')}"
    assert not any(name.startswith("scipy.") for name in found)


def test_the_rest_of_the_code_is_what_else_was_imported(package: Path) -> None:
    numbers = code_of(["gptattn.attention.MultiHeadAttention"])
    rest = other_code(numbers, ["mypackage"])
    assert "gptattn.machine.source_code" in rest
    assert not rest.keys() & numbers.keys()
    assert all(name in sys.modules for name in rest)


def test_what_is_edited_after_the_first_look_is_not_what_was_imported(package: Path) -> None:
    before = code()
    (package / "helper.py").write_text("def shift(x):\n    return 7\n")
    assert code() == before


def test_a_helper_beside_the_variants_package_counts(package: Path) -> None:
    (package.parent / "beside_it.py").write_text("FACTOR = 1\n")
    edited(package / "helper.py", "def shift", "from beside_it import FACTOR\n\ndef shift")
    before = code()
    assert "beside_it" in before
    edited(package.parent / "beside_it.py", "1", "2")
    assert code()["beside_it"] != before["beside_it"]


def test_code_is_todays_until_it_is_edited_and_again_when_that_is_undone(package: Path) -> None:
    before = code()
    assert is_unchanged(before)
    edited(package / "helper.py", "return x", "return 2 * x")
    assert not is_unchanged(before)
    edited(package / "helper.py", "return 2 * x", "return x")
    assert is_unchanged(before)


def test_conversion_counts_where_it_is_a_target() -> None:
    assert "gptattn.weights.convert" in code_of(["gptattn.weights.convert"])
    assert "gptattn.weights.convert" not in code_of(["gptattn.attention.MultiHeadAttention"])
