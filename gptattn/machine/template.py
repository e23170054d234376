"""Fills a template of the package, escaping every value."""

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def fill_template(package: str, name: str, **values: Any) -> str:
    """Return the template's text with the values in it. Raises UndefinedError if one is missing."""
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=PackageLoader(package, ""),
    )
    return environment.get_template(name).render(values)
