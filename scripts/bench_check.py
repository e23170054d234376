"""Compares a benchmark's ratios with the committed ones, and fails where one has become worse.

`make bench-check` measures, and then runs: python scripts/bench_check.py MEASURED [COMMITTED]
Both are files as `make bench` writes them. Without any, only whether the committed one can be
compared with is checked. Only ratios are compared, never seconds: machines differ. A ratio is
paired by round, and larger is better for us; it is worse where its 95% interval lies wholly below
the committed one's. Ratios that only one file has are named, and do not fail; none in common does.
"""

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

COMMITTED = Path(__file__).parents[1] / "benchmarks" / "latest.json"
FEWEST_ROUNDS = 3  # with two, an interval is so wide that nothing lies outside
Interval = tuple[float, float, float]  # lower end, geometric mean, upper end


def read(file: Path) -> dict[str, Any]:
    """Return a file that `make bench` has written; exit if it cannot be compared."""
    if not file.is_file():
        sys.exit(f"error: {file} is not there; `make bench` writes benchmarks/latest.json")
    try:
        record = json.loads(file.read_text())
        rounds = {
            bench: [len(entry["seconds"][entry["base"]]), *map(len, entry["seconds"].values())]
            for bench, entry in record["benchmarks"].items()
        }
        _ = record["processor"], record["torch"]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        sys.exit(f"error: {file} is not what `make bench` writes ({error!r}); measure again")
    for bench, counts in rounds.items():
        if min(counts) < FEWEST_ROUNDS or len(set(counts)) > 1:
            sys.exit(
                f"error: {file}: {bench} has {min(counts)} of the {max(*counts, FEWEST_ROUNDS)} "
                "rounds that a comparison needs; measure again, with more"
            )
    return record


def ratios(record: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return name -> the ratio in each round, of all benchmarks of a file.

    A peer's is its seconds over those of our base, another of ours is the base's seconds over its.
    """
    found = {}
    for bench, entry in record["benchmarks"].items():
        base = entry["seconds"][entry["base"]]
        for name, seconds in entry["seconds"].items():
            pairs = list(zip(base, seconds, strict=True))
            if name.startswith("peer"):
                found[f"{bench}: {entry['base']} / {name}"] = [peer / own for own, peer in pairs]
            elif name != entry["base"]:
                found[f"{bench}: {name} / {entry['base']}"] = [own / other for own, other in pairs]
    return found


def interval(values: Sequence[float]) -> Interval:
    """Return the 95% interval of the geometric mean; Student's t, of logarithms."""
    from scipy.stats import t  # not needed to see whether there is something to compare with

    logs = [math.log(value) for value in values]
    mean = fmean(logs)
    half = float(t.ppf(0.975, len(logs) - 1)) * stdev(logs) / len(logs) ** 0.5
    return math.exp(mean - half), math.exp(mean), math.exp(mean + half)


def compare(measured: Mapping[str, Any], committed: Mapping[str, Any]) -> list[str]:
    """Print each ratio beside the committed one; return the names of those that are worse."""
    for key in ("processor", "torch"):
        then, today = committed[key], measured[key]
        print(f"{key}: {today}" if then == today else f"warning: {key}: {today}, before {then}")
    now, before = ratios(measured), ratios(committed)
    both = [name for name in before if name in now]
    if not both:
        sys.exit("error: the two files have no ratio in common, so nothing was compared")
    print(f"{'':52} {'committed':>24} {'measured':>24}")
    worse = []
    for name in both:
        old, new = interval(before[name]), interval(now[name])
        if new[2] < old[0]:
            worse.append(name)
        cells = [f"{mean:8.3f} [{low:.3f}, {high:.3f}]" for low, mean, high in (old, new)]
        print(f"{name:52} {cells[0]:>24} {cells[1]:>24}{'  WORSE' if name in worse else ''}")
    for name in sorted(now.keys() ^ before.keys()):
        print(f"{name}: only {'measured' if name in now else 'committed'}")
    return worse


def main() -> None:
    """Compare the files; exit with 1 if a ratio is worse."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("measured", type=Path, nargs="?")
    parser.add_argument("committed", type=Path, nargs="?", default=COMMITTED)
    args = parser.parse_args()
    committed = read(args.committed)
    worse = [] if args.measured is None else compare(read(args.measured), committed)
    if worse:
        sys.exit(f"worse than {args.committed}: {', '.join(worse)}")


if __name__ == "__main__":
    main()
