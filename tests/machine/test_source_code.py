"""Hashes of the code that a run's numbers come from: what counts, and what does not."""

from importlib.metadata import version
from pathlib import Path

import pytest

from gptattn.machine import source_code
from gptattn.machine.source_code import hash_code, is_unchanged

FILES = {
    "__init__.py": "from mine.one import One\nfrom mine.two import Two\nimport missing.part\n",
    "one.py": '"""Doc."""\nfrom gptattn.attention import GroupedQueryAttention\n'
    "from .helper import f\n\nclass One(GroupedQueryAttention):\n    a = f\n",
    "two.py": "class Two:\n    pass\n",
    "helper.py": "import beside_it\n\ndef f(x):\n    return x  # as it is\n\ndef g(x):\n"
    "    assert x, 'of you'\n    raise ValueError('no', x)\n",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of a user's own: a variant, what it imports, and another variant."""
    home = tmp_path / "mine"
    home.mkdir()
    for name, text in FILES.items():
        (home / name).write_text(text)
    (tmp_path / "beside_it.py").write_text("A = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    return home


def code(target: str = "mine.One") -> dict[str, str]:
    """Its code as a new process sees it, without that of gptattn."""
    source_code.read_source.cache_clear()
    found = hash_code([target], ["mine"])
    return {name: value for name, value in found.items() if not name.startswith("gptattn.")}


def test_a_variant_is_made_of_its_module_and_what_that_imports(package):
    # Also by the name under which the package exports it.
    assert set(code("mine.One")) == {"mine.one", "mine.helper", "beside_it"}
    assert code("mine.one.One") == code("mine.One")
    assert set(code("mine.Two")) == {"mine.two"}
    assert "gptattn.attention.variants.gqa" in hash_code(["mine.One"], ["mine"])  # its base class


def test_every_run_is_made_of_the_core_and_of_no_other_variant():
    found = hash_code(["gptattn.attention.GroupedQueryAttention"])
    assert set(source_code.COMMON) <= set(found)
    assert {"gptattn.attention.variants.gqa", "gptattn.attention.core"} <= set(found)
    assert not {"gptattn.attention.variants.mla", "gptattn.training.run"} & set(found)


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("  # as it is", "  # as it was", True),
        ("return x", '"""What."""\n\n    return (x)', True),
        ("return x", "return x\n    raise ValueError('this')", False),
        ("'no'", "'not so'", True),
        ("'of you'", "'of us'", True),
        ("return x", "return -x", False),
    ],
)
def test_comments_docstrings_layout_and_messages_do_not_count(package, old, new, same):
    before = code()
    file = package / "helper.py"
    file.write_text(FILES["helper.py"].replace(old, new))
    assert hash_code(["mine.One"], ["mine"])["mine.helper"] == before["mine.helper"]  # as imported
    after = code()
    assert {name for name in after if after[name] != before[name]} == (
        set() if same else {"mine.helper"}
    )
    assert is_unchanged(before) is same
    file.write_text(FILES["helper.py"])
    source_code.read_source.cache_clear()
    assert is_unchanged(before)


def test_the_hash_of_a_file_is_the_same_under_every_python(tmp_path):
    file = tmp_path / "one.py"
    file.write_text('def f(x: int = 3) -> str:\n    return f"{x!r:>4} and {x}" if x else None\n')
    # Computed under Python 3.11.7, 3.12.1 and 3.13.0.
    assert source_code.read_source("one", file).hash == "83b11bff4a60a276"


def test_an_installed_package_counts_by_its_version():
    found = hash_code(["yaml.nodes.Node"], ["yaml"])  # of the distribution PyYAML
    assert found["yaml"] == f"version {version('PyYAML')}"
    assert not any(name.startswith("yaml.") for name in found)
    assert is_unchanged(found)
