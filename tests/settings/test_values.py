"""Values are checked against the type and range that each setting declares."""

import math
import re
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import pytest
from building import settings

from gptattn.errors import ConfigError
from gptattn.settings.config import TrainConfig
from gptattn.settings.values import RANGE, build_dataclass, check_values, within


@dataclass
class Inner:
    share: float = field(metadata=within(least=0, below=1))


@dataclass
class Outer:
    count: int = field(metadata=within(above=0, most=9))
    heat: float | None = field(metadata=within(least=1e-3))
    inner: Inner


GOOD = {"count": 3, "heat": None, "inner": {"share": 0.5}}


def test_a_record_may_lack_a_setting_that_came_with_a_default():
    @dataclass(frozen=True)
    class Later:
        old: int
        new: int | None = None

    assert build_dataclass(Later, {"old": 1}) == Later(1, None)
    assert build_dataclass(Later, {"old": 1, "new": 2}) == Later(1, 2)
    with pytest.raises(ConfigError, match=r"^old: is missing"):
        build_dataclass(Later, {"new": 2})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"count": 0}, "count: 0 is not a positive number; give one above 0"),
        ({"count": 10}, "count: 10 is too large; at most 9"),
        ({"heat": 0.0}, "heat: 0.0 is out of range; give 0.001 or more"),
        ({"heat": math.inf}, "heat: inf is out of range; give 0.001 or more"),
        ({"heat": math.nan}, "heat: nan is out of range; give 0.001 or more"),
        ({"inner": {"share": 1.0}}, "inner.share: 1.0 is out of range; give 0 or more, below 1"),
        ({"inner": {"share": -0.1}}, "inner.share: -0.1 is out of range; give 0 or more, below 1"),
        ({"inner": {}}, "inner.share: is missing; give a value"),
        ({"cuont": 7}, "cuont: is not a setting; did you mean count?"),
        ({"count": "x"}, "count: Value 'x' of type 'str' could not be converted to Integer"),
    ],
)
def test_a_table_is_held_to_its_declaration(change, said):
    check_values(build_dataclass(Outer, GOOD))
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}"):
        check_values(build_dataclass(Outer, GOOD | change))


def numbers(kind: Any, path: str = "") -> list[tuple[str, Any]]:
    """(dotted name, field) of every numeric setting."""
    found = []
    for one in fields(kind):
        if is_dataclass(one.type):
            found += numbers(one.type, f"{path}{one.name}.")
        elif one.type in (int, float, int | None, float | None):
            found.append((f"{path}{one.name}", one))
    return found


@pytest.mark.parametrize(("name", "one"), numbers(TrainConfig))
def test_every_number_of_a_run_has_a_range_and_is_held_to_it(name, one):
    assert RANGE in one.metadata
    cfg = settings()
    *group, last = name.split(".")
    for wrong in (-1, math.inf):
        inner = replace(getattr(cfg, group[0]), **{last: wrong}) if group else wrong
        with pytest.raises(ConfigError, match=f"^{re.escape(name)}: "):
            check_values(replace(cfg, **{group[0] if group else last: inner}))
