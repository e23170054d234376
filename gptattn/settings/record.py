"""Adds to a run's recorded settings those that are newer."""

from copy import deepcopy
from dataclasses import is_dataclass
from functools import cache
from operator import attrgetter
from typing import Any, get_origin

from gptattn.settings.config import Settings, TrainConfig
from gptattn.settings.values import bare, list_hints

EARLIER = {"validation.tokens": None}  # newer settings -> what earlier runs did, if not the default


def complete_record(node: dict[str, Any], kind: Any = Settings, path: str = "") -> None:
    """Add to a run's record the settings newer than it, with their default, or that in EARLIER.

    The record must have each table of `conf/train.yaml`.
    """
    for name, hint in list_hints(kind).items():
        below, type_ = node.get(name), bare(hint)
        if is_dataclass(type_):
            if isinstance(below, dict):
                complete_record(below, type_, f"{path}{name}.")
        elif name not in node and (path or get_origin(type_) is not dict):
            full = path + name
            default = EARLIER[full] if full in EARLIER else attrgetter(full)(_compose_defaults())
            node[name] = deepcopy(default)


@cache
def _compose_defaults() -> TrainConfig:
    from gptattn.settings.compose import settings  # imports Hydra, which a complete record spares

    return settings()
