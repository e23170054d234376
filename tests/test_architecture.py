"""Every module and function that docs/architecture.md names exists."""

import itertools
import pkgutil
import re
from importlib.util import find_spec

from test_layering import ROOMS

from gptattn.settings.compose import CONF

PAGE = (CONF.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
NAMES = sorted({*re.findall(rf"`((?:{'|'.join(itertools.chain(*ROOMS))})\.[\w.]+)`", PAGE)})


def test_every_module_and_function_that_the_page_names_is_there() -> None:
    assert len(NAMES) > 15
    for name in NAMES:
        if find_spec_of(f"gptattn.{name}"):
            continue  # a module: not imported, since importing some of them runs something
        assert callable(pkgutil.resolve_name(f"gptattn.{name}")), name


def find_spec_of(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is a module: it is a function or class
        return False
