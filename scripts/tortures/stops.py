"""Runs that are killed, stopped, or find their newest checkpoint damaged."""

import random
import re
import signal
import time
from functools import partial
from pathlib import Path

from gptattn.runs.folder import RunFolder, step_of
from tortures.bench import VALIDATIONS, Bench, Process, Result
from tortures.faults import Moments

KILLS_IN_A_ROW = 5
WAYS = ("cut", "one bit", "empty", "missing", "dangling link")


def kill(bench: Bench, count: int, result: Result) -> None:
    """SIGKILL at a random moment, inside of a validation, inside of a save, and twice in a row."""
    for i in range(count):
        bench.draw("kill", i)
        result.tried += 1
        name, variant = f"kill_{i}", bench.variant_of(f"_{i}")
        way = ("any moment", "validation", "save", "twice")[i % 4]
        if way in ("any moment", "twice"):
            killed = _killed_later(bench, name, bench.begin(name, variant))
            if way == "twice":
                killed &= _killed_later(bench, name, bench.resume(name))
        else:
            kind = "validation" if way == "validation" else bench.random.choice(("write", "name"))
            moments = Moments(kind, bench.random.randint(1, bench.moments(kind)))
            killed = bench.begin(name, variant, inside=moments).wait() == -signal.SIGKILL
        result.count(f"killed: {way}", int(killed))
        bench.check_whole(name, result)
        bench.finish(name, result)


def _killed_later(bench: Bench, name: str, process: Process) -> bool:
    if bench.after_rows(name, process):
        process.send(signal.SIGKILL)
    return process.wait() == -signal.SIGKILL


def save(bench: Bench, count: int, result: Result) -> None:
    """SIGKILL while a checkpoint is written, named, or an old one removed; five times each run."""
    name = ""
    for i in range(count):
        bench.draw("save", i)
        result.tried += 1
        kind = ("write", "name")[i % 2]
        most = round(1.5 * bench.moments(kind) / VALIDATIONS)
        moments = Moments(kind, bench.random.randint(1, most))
        number = i // KILLS_IN_A_ROW
        if i % KILLS_IN_A_ROW == 0:
            name = f"save_{number}"
            process = bench.begin(name, bench.variant_of(name), inside=moments)
        else:
            process = bench.resume(name, inside=moments)
        code = process.wait()
        result.count("kills", int(code == -signal.SIGKILL))
        result.check(code in (-signal.SIGKILL, 0), f"ended with {code}: {process.complaint()}")
        bench.check_whole(name, result)
        if (i + 1) % KILLS_IN_A_ROW == 0 or i + 1 == count:
            result.count("runs")
            process = bench.finish(name, result)
            result.check("warning: checkpoint" not in process.text(), "a checkpoint was damaged")


def stop(bench: Bench, count: int, result: Result) -> None:
    """SIGTERM and Ctrl-C in turn, at random moments of the training."""
    for i in range(count):
        bench.draw("signal", i)
        result.tried += 1
        name = f"signal_{i}"
        number, expected = ((signal.SIGTERM, 143), (signal.SIGINT, 130))[i % 2]
        process = bench.begin(name, bench.variant_of(name))
        sent = bench.after_rows(name, process)
        process.send(number)
        start = time.monotonic()
        code = process.wait()
        result.largest("slowest end in s", time.monotonic() - start)
        result.check(sent, "it ended before the signal")
        result.check(code == expected, f"ended with {code} instead of {expected}")
        said = re.search(r"holds step (\d+);", process.text())
        known = RunFolder(bench.folder / name).known_checkpoints()
        if known:
            newest = step_of(known[0])
            result.check(said is not None and int(said.group(1)) == newest, "it named another step")
        else:
            # Stopped between its first row, of costs, and its first step.
            rows = RunFolder(bench.folder / name).rows_file.read_text(encoding="utf-8")
            result.count("before the first step")
            result.check("train/loss" not in rows, "steps were taken but none was saved")
        bench.finish(name, result)


def corrupt(bench: Bench, count: int, result: Result) -> None:
    """The newest checkpoint of a killed run is damaged; each tenth time all of them are."""
    for i in range(count):
        bench.draw("corrupt", i)
        result.tried += 1
        name = f"corrupt_{i}"
        run = RunFolder(bench.folder / name)
        process = bench.begin(name, bench.variant_of(name))
        process.wait_until(partial(_has, bench, name, 5 * bench.random.randint(2, 4)))
        process.send(signal.SIGKILL)
        process.wait()
        known = [path for path in run.known_checkpoints() if path.exists()]
        if i % 10 == 9:
            for path in known:
                damage(path, bench.random.randrange(2), bench.random)
            process = bench.resume(name)
            code = process.wait()
            result.count("no good checkpoint: exit 4", int(code == 4))
            result.check(code == 4, f"ended with {code} without a good checkpoint")
            continue
        way = i % len(WAYS)
        damage(known[0], way, bench.random)
        process = bench.finish(name, result)
        warnings = [line for line in process.text().splitlines() if line.startswith("warning: ")]
        named = len(warnings) == 1 and all(path.name in warnings[0] for path in known[:2])
        result.count(f"passed over: {WAYS[way]}", int(named))
        result.check(named, f"{WAYS[way]}: warnings {warnings} do not name both")


def _has(bench: Bench, name: str, rows: int) -> bool:
    """Whether there are more rows than that, and both checkpoints that are kept."""
    there = [path for path in RunFolder(bench.folder / name).known_checkpoints() if path.exists()]
    return bench.rows(name) > rows and len(there) >= 2


def damage(path: Path, way: int, chance: random.Random) -> None:
    """Damage the file in one of WAYS."""
    data = bytearray(path.read_bytes())
    path.unlink()
    match WAYS[way]:
        case "cut":
            path.write_bytes(data[: chance.randrange(len(data))])
        case "one bit":
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            path.write_bytes(data)
        case "empty":
            path.write_bytes(b"")
        case "dangling link":
            path.symlink_to(path.parent / "nowhere")
