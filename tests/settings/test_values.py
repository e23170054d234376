"""Values are checked against the type and range that each setting declares."""

import math
import re
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from typing import Annotated, Any, Literal, get_args, get_type_hints

import pytest
from building import settings
from msgspec import Meta
from support import refuses

from gptattn.errors import ConfigError
from gptattn.settings.config import TrainConfig, check
from gptattn.settings.identity import settings_key
from gptattn.settings.record import complete_record
from gptattn.settings.values import build_dataclass


@dataclass
class Inner:
    share: Annotated[float, Meta(ge=0, lt=1)]


@dataclass
class Outer:
    count: Annotated[int, Meta(gt=0, le=9)]
    heat: Annotated[float, Meta(ge=1e-3)] | None
    inner: Inner
    word: Literal["low", "high"] = "low"
    on: bool = True
    sizes: list[Annotated[int, Meta(gt=0)]] = field(default_factory=list)
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)
    name: str = ""


GOOD = {"count": 3, "heat": None, "inner": {"share": 0.5}}


def test_a_record_takes_defaults_for_newer_settings_but_needs_every_table():
    record = asdict(settings("seed=3"))
    del record["checks"], record["log_every"], record["optim"]["decay"]
    del record["trainer"]["callbacks"]
    complete_record(record)
    assert build_dataclass(TrainConfig, record) == settings("seed=3")
    assert settings_key(record) == settings_key(asdict(settings("seed=3")))
    del record["validation"]["tokens"]  # of a run that scored all of the held-out text
    complete_record(record)
    assert record["validation"]["tokens"] is None
    for name in ("attn", "model"):
        lacking = {key: value for key, value in record.items() if key != name}
        complete_record(lacking)
        with pytest.raises(ConfigError, match=f"^{name}: is missing"):
            build_dataclass(TrainConfig, lacking)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"count": 0}, "count: whole number >= 1"),
        ({"count": 10}, "count: whole number <= 9"),
        ({"count": 3.0}, "count: whole number"),
        ({"count": True}, "count: whole number"),
        ({"heat": 0.0}, "heat: number >= 0.001"),
        ({"heat": math.inf}, "heat: finite"),
        ({"heat": math.nan}, "heat: number >= 0.001"),
        ({"heat": "1e-3"}, "heat: number or null"),
        ({"on": 2}, "on: true or false"),
        ({"word": "hihg"}, "word: high?"),
        ({"word": 3}, "word: low or high"),
        ({"sizes": 3}, "sizes: list"),
        ({"sizes": [3, 0]}, "sizes[1]: >= 1"),
        ({"tables": {"a": 3}}, "tables.a: table"),
        ({"name": ["a"]}, "name: string"),
        ({"inner": 3}, "inner: table"),
        ({"inner": {"share": 0.5, "heat": 1}}, "inner.heat: not a setting"),
        ({"inner": {"share": 1.0}}, "inner.share: < 1"),
        ({"inner": {"share": None}}, "inner.share: null"),
        ({"inner": {}}, "inner.share: missing"),
        ({"cuont": 7}, "cuont: count?"),
    ],
)
def test_a_table_is_held_to_its_declaration(change, said):
    with refuses(said):
        build_dataclass(Outer, GOOD | change)


def test_an_int_is_a_number_and_a_number_is_text_where_these_are_declared():
    made = build_dataclass(Outer, GOOD | {"heat": 2, "name": 7})
    assert made == Outer(3, 2.0, Inner(0.5), name="7")
    assert type(made.heat) is float


def numbers(kind: Any, path: str = "") -> list[str]:
    """The dotted name of every numeric setting."""
    found = []
    for name, hint in get_type_hints(kind).items():
        if is_dataclass(hint):
            found += numbers(hint, f"{path}{name}.")
        elif {int, float} & {hint, *get_args(hint)}:
            found.append(f"{path}{name}")
    return found


@pytest.mark.parametrize("name", numbers(TrainConfig))
def test_every_number_of_a_run_has_a_range_and_is_held_to_it(name):
    cfg = settings()
    *group, last = name.split(".")
    for wrong in (-1, math.inf):
        inner = replace(getattr(cfg, group[0]), **{last: wrong}) if group else wrong
        with pytest.raises(ConfigError, match=f"^{re.escape(name)}: "):
            check(replace(cfg, **{group[0] if group else last: inner}))
