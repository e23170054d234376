"""The overrides of each run of a sweep: every combination of the values given, for every variant.

A variant is an entry of `hydra.sweeper.variants`: overrides that belong together. With a ladder,
each variant is trained at each of its sizes.
"""

import re
from collections.abc import Sequence
from itertools import islice, product

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from gptattn.errors import ConfigError
from gptattn.sweep.plan import VARIANTS
from gptattn.sweep.rungs import FIELD

MOST_RUNS = 10_000  # of one sweep
OPEN, CLOSE = "([{", ")]}"

Jobs = dict[str, list[list[str]]]  # a variant's entry -> the overrides of its runs


def jobs_of(
    loader: ConfigLoader,
    arguments: Sequence[str],
    variants: Sequence[str] | None,
    rungs: Sequence[Sequence[str]] = (),
) -> Jobs:
    """Return the jobs that `arguments` and each variant together ask for; "" without variants.

    `rungs` are the overrides of each size of a ladder, if there is one. Raises ConfigError for no
    runs or more than MOST_RUNS, for a variant that cannot be read, and for one that sets what an
    argument, the ladder or the whole sweep sets.
    """
    parser = OverridesParser.create(config_loader=loader)
    given = parser.parse_overrides(list(arguments))
    sizes = [parser.parse_overrides(list(rung)) for rung in rungs] or [[]]
    laddered = {override.key_or_group for size in sizes for override in size}
    jobs: Jobs = {}
    for variant in variants or [""]:
        try:
            own = parser.parse_overrides(words(variant))
        except HydraException:
            raise ConfigError(
                VARIANTS, f"{variant!r} cannot be read; write name=value name=value, as a command"
            ) from None
        for override in own:
            key = override.key_or_group
            if re.match(r"hydra([./]|$)", key):
                raise ConfigError(
                    VARIANTS,
                    f"{variant!r} sets {key}, which all runs of a sweep share; give it outside the "
                    "list",
                )
            if any(other.key_or_group == key for other in given):
                raise ConfigError(
                    key, f"is also in {VARIANTS}, {variant!r}; leave it out, or give another list"
                )
        for key in (override.key_or_group for override in [*given, *own]):
            if laddered and (key in laddered or key.startswith("budget.")):
                raise ConfigError(key, f"has no place beside {FIELD}; leave one of them out")
        jobs[variant] = [job for size in sizes for job in _combined([*own, *size, *given])]
    if sum(map(len, jobs.values())) > MOST_RUNS:
        raise ConfigError("command line", f"asks for more than {MOST_RUNS:,} runs; give fewer")
    return jobs


def _combined(overrides: Sequence[Override]) -> list[list[str]]:
    """Return all combinations of the overrides' values. Raises ConfigError for none or too many."""
    choices: list[list[str]] = []
    runs = 1
    for override in overrides:
        key = override.get_key_element()
        if not override.is_sweep_override():
            choices.append([f"{key}={override.get_value_element_as_str()}"])
            continue
        try:
            values = list(islice(override.sweep_string_iterator(), MOST_RUNS + 1))
        except (ValueError, ArithmeticError):  # a range with a step of 0, or of nan
            raise ConfigError(override.key_or_group, "is not a valid range") from None
        if not values:
            raise ConfigError(override.key_or_group, "has no value; give one or more")
        runs *= len(values)
        if runs > MOST_RUNS:
            raise ConfigError("command line", f"asks for more than {MOST_RUNS:,} runs; give fewer")
        choices.append([f"{key}={value}" for value in values])
    return [list(job) for job in product(*choices)]


def with_seeds(jobs: Jobs, seeds: Sequence[int]) -> Jobs:
    """Return the jobs with each of these seeds in place of their own; what is done stays so.

    Raises ConfigError for more than MOST_RUNS.
    """
    own = re.compile(r"\+*(seed|sweep\.fresh)=")
    found: Jobs = {}
    for variant, some in jobs.items():
        bare = {tuple(o for o in job if not own.match(o)): None for job in some}
        found[variant] = [
            [*job, "sweep.fresh=false", f"seed={seed}"] for job in bare for seed in seeds
        ]
    if sum(map(len, found.values())) > MOST_RUNS:
        raise ConfigError("sweep.max_seeds", f"allows more than {MOST_RUNS:,} runs; give fewer")
    return found


def words(text: str) -> list[str]:
    """Split at spaces, except between quotes or brackets: those belong to Hydra's values."""
    found, depth, quote = [""], 0, ""
    for i, c in enumerate(text):
        if quote:
            quote = "" if c == quote and text[i - 1] != "\\" else quote
        elif c in "'\"":
            quote = c
        else:
            depth += (c in OPEN) - (c in CLOSE)
        if c.isspace() and not quote and not depth:
            found.append("")
        else:
            found[-1] += c
    return [word for word in found if word]
