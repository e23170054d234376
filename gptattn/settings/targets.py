"""Check which classes and functions a config names, in its whole tree, before any is built."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from gptattn.errors import ConfigError

# The package that holds each group's classes and functions; allow_targets adds to all of them.
HOMES = {
    "attn": "gptattn.attention",
    "match_attn": "gptattn.attention",
    "pattern_attn": "gptattn.attention",
    "part": "gptattn.attention.parts",
    "position": "gptattn.position",
    "data": "gptattn.data",
    "tokenizer": "gptattn.data",
    "optim.matrices": "gptattn.optim",
    "logger": "gptattn.training.trackers",
}


SOURCES = ("data", "sources")  # specs by name, below the spec of a mixture
NAMED = ("part", "pattern_attn", "logger")  # groups that hold any number of specs, by name


class ForeignTarget(ConfigError):
    """A `_target_` outside the packages that the command allows."""


def check_targets(node: Any, allow_targets: Sequence[str]) -> None:
    """Raise ConfigError for any `_target_` in the tree that is not allowed where it stands.

    `node` is a whole config as plain values, without `hydra`. Imports nothing.
    """
    for path, target in named(node):
        group, *below = ("optim.matrices",) if path == ("optim", "matrices") else path
        if path[:2] == SOURCES and len(path) == 3:
            below = []
        field = ".".join((*path, "_target_"))
        if path in (("part",), ("logger",)):
            raise ConfigError(field, f"has no name; begin its file with '# @package {group}.NAME'")
        if len(below) != (group in NAMED) or group not in HOMES:
            raise ConfigError(field, "has no meaning here; leave it out")
        check_name(field, target, [HOMES[group], *allow_targets])


def check_name(field: str, target: Any, packages: Iterable[str], *, private: bool = False) -> None:
    """Raise ConfigError if `target` is not a public dotted name inside one of the packages.

    `private` also allows names that begin with an underscore.
    """
    packages = list(packages)
    if not isinstance(target, str):
        raise ConfigError(field, "is missing; name a class, package.module.Class")
    if not any(target.startswith(f"{package}.") for package in packages):
        raise ForeignTarget(
            field,
            f"{target[:100]} is outside of {', '.join(packages)}; "
            "add its package to allow_targets, if you trust it",
        )
    parts = target.replace(":", ".").split(".")
    if not all(part.isidentifier() and (private or part[0] != "_") for part in parts):
        raise ConfigError(
            field, f"{target[:100]!r} is not a public name; give package.module.Class"
        )


def named(node: Any, key: str = "_target_") -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (path, value) of each `key` in a tree of dicts and lists of any depth."""
    waiting: list[tuple[tuple[str, ...], Any]] = [((), node)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, dict):
            if key in value:
                yield path or ("config",), value[key]
            waiting += [((*path, str(name)), child) for name, child in value.items()]
        elif isinstance(value, list):
            waiting += [((*path, str(i)), child) for i, child in enumerate(value)]
