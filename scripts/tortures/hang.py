"""A run that waits for ever."""

import time

from tortures.bench import STEPS, Bench, Result
from tortures.faults import Stall

LIMIT = 3.0  # seconds, hang_seconds of the runs
ALLOWED = 60.0  # beyond it


def hang(bench: Bench, count: int, result: Result) -> None:
    """The data never come, also with the interpreter locked, or a validation never ends."""
    for i in range(count):
        bench.draw("hang", i)
        result.tried += 1
        name, place = f"hang_{i}", Stall.PLACES[i % len(Stall.PLACES)]
        stall = Stall(place, bench.random.randint(12, STEPS - 2))
        process = bench.begin(name, bench.variant_of(name), f"hang_seconds={LIMIT:g}", inside=stall)
        last, rows = time.monotonic(), 0
        while process.poll() is None:
            if (now := bench.rows(name)) != rows:
                last, rows = time.monotonic(), now
            time.sleep(0.05)
        seconds = time.monotonic() - last
        code, text = process.wait(), process.text()
        result.largest(f"s beyond the limit: {place}", seconds - LIMIT)
        result.check(code == 1, f"{place}: ended with {code}")
        result.check(seconds < LIMIT + ALLOWED, f"{place}: took {seconds:.0f} s")
        stacks = " in stalled\n" in text or " in batches\n" in text
        result.check(stacks, f"{place}: no stack trace of the stall")
        result.check(
            "error: hang_seconds: " in text or "Timeout (" in text, f"{place}: no reason printed"
        )
        bench.check_whole(name, result)
        bench.finish(name, result)
