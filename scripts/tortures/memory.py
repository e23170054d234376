"""Whether a process grows: over one long run, and over many runs in one process."""

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from gptattn.runs.folder import done_below
from tortures.bench import SETTINGS, VARIANTS, Bench, Process, Result

ALLOWED = 0.02  # of growth after the warm-up
WARM_UP = 0.2  # of the run, and of the runs


def memory(bench: Bench, count: int, result: Result) -> None:
    """One run of `count` x 1,000 steps, and a sweep of `count` x 2.5 runs in one process."""
    steps, runs = 1000 * count, round(2.5 * count)
    process = bench.begin(
        "long_0", VARIANTS[0], f"budget.steps={steps}", "validation.count=20", "log_every=50"
    )
    # A row each 50 steps, and two more with each validation.
    over_steps = _sampled(process, lambda: bench.rows("long_0"), 0.2)
    _judge(result, f"a run of {steps:,} steps", over_steps)
    last = [f"seed=range(1,{runs + 1})", "hydra/launcher=basic", "experiment_name=grow"]
    home = bench.folder / "outputs" / "grow"
    process = bench.start("grow", f"attn={VARIANTS[0]}", *SETTINGS, *last, "-m")
    over_runs = _sampled(process, lambda: _finished(home), 0.05)
    _judge(result, f"{runs} runs in one process", over_runs)
    result.check(_finished(home) == runs, f"{_finished(home)} runs of {runs} have finished")
    result.tried = 2


def _finished(home: Path) -> int:
    return len(done_below(home))


def _sampled(process: Process, progress: Callable[[], int], seconds: float) -> dict[int, int]:
    """The resident bytes, by progress: the newest figure of each."""
    found: dict[int, int] = {}
    while process.poll() is None:
        try:
            resident = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * 4096
            if resident:  # none is left of a process that is just ending
                found[progress()] = resident
        except (OSError, IndexError):
            pass
        time.sleep(seconds)
    return found


def _judge(result: Result, what: str, found: dict[int, int]) -> None:
    most = max(found, default=0)
    warm = {at: resident for at, resident in found.items() if at >= WARM_UP * most}
    values = list(warm.values())
    quarter = len(values) // 4  # Python lets go of memory in waves, of some runs each
    if quarter == 0:
        result.check(False, f"{what}: only {len(values)} samples")
        return
    growth = median(values[-quarter:]) / median(values[:quarter]) - 1
    result.facts[f"growth: {what}"] = round(growth, 4)
    result.facts[f"MB: {what}"] = round(max(values) / 1e6, 1)
    result.check(growth <= ALLOWED, f"{what}: grew by {growth:.1%}")
