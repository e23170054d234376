"""Stops, kills and damages small runs, resumes them, and compares the ends bit by bit.

`python scripts/torture.py` is the short form; `count=200 row=kill` the long one of a row. Rows:
kill (SIGKILL at random moments), save (while a checkpoint is written), signal (SIGTERM and Ctrl-C
in turn), corrupt (the newest checkpoint is damaged in five ways). It prints a line per row and
ends with one line of JSON; the exit code is 1 where a promise was broken.
"""

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gptattn.arguments import parse
from gptattn.checkpoint import choose_checkpoint, known_checkpoints
from gptattn.cli import report
from gptattn.compose import CONF
from gptattn.errors import ConfigError

VARIANTS = sorted(file.stem for file in (CONF / "attn").glob("*.yaml"))
STEPS = 60
SETTINGS = (
    "model.num_layers=2",
    "model.dropout=0.1",
    "batch_size=4",
    "accumulate=2",
    f"budget.steps={STEPS}",
    "validation.count=6",
    "sample.tokens=4",
    "log_every=3",
    "trainer=cpu",
    "trainer.threads=1",
)
LIMIT_SECONDS = 600.0  # for one process of this size


@dataclass(frozen=True)
class Settings:
    row: str = "all"  # kill | save | signal | corrupt
    count: int = 2  # of each row
    seed: int = 1  # of the moments and of the damage
    keep: bool = False  # the folder with all runs


@dataclass
class Result:
    row: str
    tries: int = 0
    resumed: int = 0
    exact: int = 0
    unreadable: int = 0
    leftovers: int = 0
    wrong_exit: int = 0
    slowest_save_s: float = 0.0  # from a signal to the end of the process

    @property
    def kept(self) -> bool:
        bad = self.unreadable + self.leftovers + self.wrong_exit
        return self.exact == self.tries and bad == 0


def fingerprint(run: Path) -> str:
    """SHA-256 of a finished run's weights, optimizer and rows, times and speeds left out."""
    content = choose_checkpoint(run / "checkpoints").content
    sha = hashlib.sha256()
    states = content["optimizer_states"][0]["state"]
    tensors = dict(content["state_dict"])
    tensors |= {f"{i}/{name}": t for i, state in states.items() for name, t in state.items()}
    for name, tensor in sorted(tensors.items()):
        sha.update(name.encode() + tensor.contiguous().numpy().tobytes())
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        same = {k: v for k, v in row.items() if not k.startswith("perf/")}
        for name in ("time", "progress/seconds"):
            same.pop(name, None)
        sha.update(json.dumps(same, sort_keys=True).encode())
    return sha.hexdigest()


class Bench:
    """Starts runs in a folder, and knows how they end when nobody disturbs them."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.random = folder, random.Random(seed)
        self.whole: dict[str, str] = {}

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(CONF.parent / "train.py"), *arguments]
        with (self.folder / "console.log").open("ab") as log:
            return subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log)

    def begin(self, name: str, variant: str) -> subprocess.Popen[bytes]:
        return self.start(f"attn={variant}", *SETTINGS, f"hydra.run.dir={name}")

    def expected(self, variant: str) -> str:
        if variant not in self.whole:
            name = f"whole_{variant}"
            code = self.begin(name, variant).wait(LIMIT_SECONDS)
            if code:
                raise ConfigError("torture", f"the undisturbed run of {variant} ended with {code}")
            self.whole[variant] = fingerprint(self.folder / name)
        return self.whole[variant]

    def finish(self, name: str, variant: str, result: Result) -> None:
        """Resume to the end, and compare."""
        run = self.folder / name
        code = self.start(f"resume={name}").wait(LIMIT_SECONDS)
        result.wrong_exit += code != 0
        result.resumed += code == 0
        result.leftovers += len(list(run.rglob("*.part")))
        result.exact += code == 0 and fingerprint(run) == self.expected(variant)

    def wait_until(self, process: subprocess.Popen[bytes], reached: Callable[[], bool]) -> bool:
        """Whether it came to that before the process ended."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while process.poll() is None and time.monotonic() < deadline:
            if reached():
                return True
            time.sleep(0.001)
        return False

    def rows(self, name: str) -> int:
        try:
            return (self.folder / name / "metrics.jsonl").read_bytes().count(b"\n")
        except OSError:
            return 0

    def disturb(self, name: str, process: subprocess.Popen[bytes], number: int) -> None:
        """Send the signal once a random number of rows more has been written."""
        rows = self.rows(name) + self.random.randint(1, 30)
        if self.wait_until(process, lambda: self.rows(name) >= rows):
            time.sleep(self.random.uniform(0, 0.02))
            process.send_signal(number)


def kill(bench: Bench, i: int, result: Result) -> None:
    """SIGKILL at a random moment; every other time the resumed run is killed as well."""
    name, variant = f"kill_{i}", VARIANTS[i % len(VARIANTS)]
    process = bench.begin(name, variant)
    bench.disturb(name, process, signal.SIGKILL)
    process.wait(LIMIT_SECONDS)
    if i % 2:
        process = bench.start(f"resume={name}")
        bench.disturb(name, process, signal.SIGKILL)
        process.wait(LIMIT_SECONDS)
    result.unreadable += unreadable(bench.folder / name)
    bench.finish(name, variant, result)


def save(bench: Bench, i: int, result: Result) -> None:
    """SIGKILL while the checkpoint has another name yet."""
    name, variant = f"save_{i}", VARIANTS[i % len(VARIANTS)]
    process = bench.begin(name, variant)
    checkpoints = bench.folder / name / "checkpoints"
    after = bench.random.randint(0, 3)

    def saving() -> bool:
        if not checkpoints.is_dir() or len(list(checkpoints.glob("*.ckpt"))) < min(after, 2):
            return False
        return any(checkpoints.glob("*.part"))

    if bench.wait_until(process, saving):
        process.kill()
    process.wait(LIMIT_SECONDS)
    result.unreadable += unreadable(bench.folder / name)
    bench.finish(name, variant, result)


def stop(bench: Bench, i: int, result: Result) -> None:
    """SIGTERM, or Ctrl-C, at a random moment of the training."""
    name, variant = f"signal_{i}", VARIANTS[i % len(VARIANTS)]
    number, code = ((signal.SIGTERM, 143), (signal.SIGINT, 130))[i % 2]
    process = bench.begin(name, variant)
    bench.disturb(name, process, number)
    sent = time.monotonic()
    ended = process.wait(LIMIT_SECONDS)
    result.slowest_save_s = max(result.slowest_save_s, round(time.monotonic() - sent, 2))
    result.wrong_exit += ended != code
    bench.finish(name, variant, result)


def corrupt(bench: Bench, i: int, result: Result) -> None:
    """The newest checkpoint of a run that was killed is damaged."""
    name, variant = f"corrupt_{i}", VARIANTS[i % len(VARIANTS)]
    process = bench.begin(name, variant)
    checkpoints = bench.folder / name / "checkpoints"
    bench.wait_until(process, lambda: len(list(checkpoints.glob("*.ckpt"))) >= 2)
    process.kill()
    process.wait(LIMIT_SECONDS)
    damage(known_checkpoints(checkpoints)[0], i, bench.random)
    bench.finish(name, variant, result)


def damage(path: Path, way: int, chance: random.Random) -> None:
    """Cut, flip a bit, empty, remove, or a link to nowhere."""
    data = bytearray(path.read_bytes())
    path.unlink()
    match way % 5:
        case 0:
            path.write_bytes(data[: chance.randrange(len(data))])
        case 1:
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            path.write_bytes(data)
        case 2:
            path.write_bytes(b"")
        case 4:
            path.symlink_to(path.parent / "nowhere")


def unreadable(run: Path) -> int:
    """How many checkpoints have their final name and are not whole."""
    checkpoints = run / "checkpoints"
    there = [path for path in known_checkpoints(checkpoints) if path.exists()]
    if not there:
        return 0
    chosen = choose_checkpoint(checkpoints)
    return sum(path in there for path, _ in chosen.passed_over)


ROWS: dict[str, Callable[[Bench, int, Result], None]] = {
    "kill": kill,
    "save": save,
    "signal": stop,
    "corrupt": corrupt,
}


def torture(settings: Settings, folder: Path) -> list[Result]:
    names = list(ROWS) if settings.row == "all" else [settings.row]
    if not set(names) <= ROWS.keys():
        raise ConfigError("row", f"{settings.row!r} is none; one of all, {', '.join(ROWS)}")
    bench, results = Bench(folder, settings.seed), []
    for name in names:
        result = Result(name)
        for i in range(settings.count):
            result.tries += 1
            ROWS[name](bench, i, result)
        results.append(result)
        facts: dict[str, Any] = asdict(result)
        print("  ".join(f"{key} {value}" for key, value in facts.items()), flush=True)
    return results


def main() -> int:
    try:
        settings = parse(Settings, sys.argv[1:])
        folder = Path(tempfile.mkdtemp(prefix="torture_", dir=os.environ.get("TMPDIR")))
        try:
            results = torture(settings, folder)
        finally:
            if settings.keep:
                print(folder)
            else:
                shutil.rmtree(folder, ignore_errors=True)
    except Exception as error:
        return report(error)
    kept = all(result.kept for result in results)
    print(json.dumps({"kept": kept, "rows": [asdict(result) for result in results]}))
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
