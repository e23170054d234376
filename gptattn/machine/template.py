"""Fills a template of the package, escaping every value."""

from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined


def fill_template(package: str, name: str, **values: Any) -> str:
    """Return the template's text with the values in it. Raises UndefinedError if one is missing."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    source = files(package).joinpath(name).read_text(encoding="utf-8")
    return environment.from_string(source).render(values)
