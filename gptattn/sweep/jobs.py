"""Lists the overrides of each run in a sweep: all combinations of values, for every variant.

A variant is an item of `hydra.sweeper.variants`: overrides that belong together.
"""

import re
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from gptattn.errors import ConfigError

VARIANTS = "hydra.sweeper.variants"


class Job(NamedTuple):
    """The overrides of one run, and the item of `variants` that it comes from, if any."""

    overrides: list[str]
    variant: str = ""


def list_jobs(
    loader: ConfigLoader,
    arguments: Sequence[str],
    variants: Sequence[str] | None,
) -> list[Job]:
    """Return the jobs for the arguments, for each variant.

    Raises ConfigError for an argument without a value, for a variant that cannot be read, and for
    one that sets what an argument or the whole sweep already sets.
    """
    parser = OverridesParser.create(config_loader=loader)
    given = parser.parse_overrides(list(arguments))
    shared = [override.key_or_group for override in given]
    jobs: list[Job] = []
    for variant in variants or [""]:
        try:
            own = parser.parse_overrides(split_overrides(str(variant)))
        except HydraException:
            raise ConfigError(
                VARIANTS, f"{variant!r} cannot be read; write name=value name=value"
            ) from None
        for key in (override.key_or_group for override in own):
            if key in shared or re.match(r"hydra([./]|$)", key):
                raise ConfigError(
                    key, f"is set for all runs, so {VARIANTS} cannot set it; drop one ({variant!r})"
                )
        values = product(*map(_list_values, [*own, *given]))
        jobs += [Job(list(overrides), variant) for overrides in values]
    return jobs


def split_overrides(text: str) -> list[str]:
    """Split a variant's overrides at spaces before a name, since values can contain spaces."""
    return re.split(r"\s+(?=[+~]*[\w./@]+=|~)", text.strip()) if text.strip() else []


def _list_values(override: Override) -> list[str]:
    """Return one override for each of its values."""
    key = override.get_key_element()
    if not override.is_sweep_override():
        return [f"{key}={override.get_value_element_as_str()}"]
    single = [f"{key}={value}" for value in override.sweep_string_iterator()]
    if not single:
        raise ConfigError(override.key_or_group, "has no value; give one or more")
    return single
