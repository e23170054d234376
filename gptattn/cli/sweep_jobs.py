"""The overrides of each run of a sweep: every combination of the values given, for every variant.

A variant is an entry of `hydra.sweeper.variants`: overrides that belong together. With a ladder,
each variant is trained at each of its sizes.
"""

import re
from collections.abc import Sequence
from itertools import islice

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
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
    sizes = [parser.parse_overrides(list(rung)) for rung in rungs]
    jobs: Jobs = {}
    for variant in variants or [""]:
        own = _parsed(parser, variant)
        _check_apart_from(sizes, [*given, *own])
        for override in own:
            if re.match(r"hydra([./]|$)", override.key_or_group):
                raise ConfigError(
                    VARIANTS,
                    f"{variant!r} sets {override.key_or_group}, which all runs of a sweep share; "
                    "give it outside the list",
                )
            if any(other.key_or_group == override.key_or_group for other in given):
                raise ConfigError(
                    override.key_or_group,
                    f"is also in {VARIANTS}, {variant!r}; leave it out, or give another list",
                )
        _check_size([*given, *own])
        jobs[variant] = []
        for size in sizes or [[]]:
            (some,) = BasicSweeper.split_arguments([*own, *size, *given], None)
            jobs[variant] += some
    if sum(map(len, jobs.values())) > MOST_RUNS:
        raise ConfigError("command line", f"asks for more than {MOST_RUNS:,} runs; give fewer")
    return jobs


def with_seeds(jobs: Jobs, seeds: Sequence[int], together: int) -> Jobs:
    """Return the jobs with each of these seeds in place of their own.

    So many run at a time, and what is done stays so. Raises ConfigError for more than MOST_RUNS.
    """
    own = re.compile(r"\+*(seed|sweep\.jobs|sweep\.fresh)=")
    more = [f"sweep.jobs={together}", "sweep.fresh=false"]
    found: Jobs = {}
    for variant, some in jobs.items():
        bare = {
            tuple(override for override in job if not own.match(override)): None for job in some
        }
        found[variant] = [[*job, *more, f"seed={seed}"] for job in bare for seed in seeds]
        if sum(map(len, found.values())) > MOST_RUNS:
            raise ConfigError("sweep.max_seeds", f"allows more than {MOST_RUNS:,} runs; give fewer")
    return found


def _check_apart_from(sizes: Sequence[Sequence[Override]], others: Sequence[Override]) -> None:
    """Raise ConfigError if another override sets what the ladder sets, or another budget."""
    set_ = {override.key_or_group for size in sizes for override in size}
    for override in others:
        key = override.key_or_group
        if sizes and (key in set_ or key.startswith("budget.")):
            raise ConfigError(key, f"has no place beside {FIELD}; leave one of them out")


def _parsed(parser: OverridesParser, variant: str) -> list[Override]:
    try:
        return parser.parse_overrides(words(variant))
    except HydraException:
        raise ConfigError(
            VARIANTS, f"{variant!r} cannot be read; write name=value name=value, as for a command"
        ) from None


def words(text: str) -> list[str]:
    """Split at spaces, except between quotes or brackets: those belong to Hydra's values."""
    found, depth, quote = [""], 0, ""
    for i, c in enumerate(text):
        if quote:
            escaped = text[i - 1] == "\\"
            quote = "" if c == quote and not escaped else quote
        elif c in "'\"":
            quote = c
        else:
            depth += (c in OPEN) - (c in CLOSE)
        if c.isspace() and not quote and not depth:
            found.append("")
        else:
            found[-1] += c
    return [word for word in found if word]


def _check_size(overrides: Sequence[Override]) -> None:
    """Raise ConfigError for a sweep of no runs or of more than MOST_RUNS, without listing them."""
    runs = 1
    for override in overrides:
        if override.is_sweep_override():
            try:
                values = islice(override.sweep_string_iterator(), MOST_RUNS + 1)
                runs = min(runs * sum(1 for _ in values), MOST_RUNS + 1)
            except (ValueError, ArithmeticError):  # a range with a step of 0, or of nan
                raise ConfigError(override.key_or_group, "is not a valid range") from None
            if runs == 0:
                raise ConfigError(override.key_or_group, "has no value; give one or more")
    if runs > MOST_RUNS:
        raise ConfigError("command line", f"asks for more than {MOST_RUNS:,} runs; give fewer")
