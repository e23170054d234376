"""Starts small runs, and knows how they end where nobody disturbs them."""

import contextlib
import hashlib
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gptattn.training.precheck
import gptattn.training.train  # noqa: F401  with lightning, so that no fork has to import it
from gptattn.settings.compose import CONF
from gptattn.cli.main import main
from gptattn.runs.checkpoint import choose_checkpoint
from gptattn.runs.folder import RunFolder
from tortures.faults import Moments

VARIANTS = sorted(file.stem for file in (CONF / "attn").glob("*.yaml"))
TEXT = "".join(f"Line {i:03d}: naïve π ≈ {i * 22 / 7:8.3f}. The end.\n" for i in range(240))
STEPS, VALIDATIONS = 40, 5
EARLY_ROWS = 9  # after which a run is never over: it writes three times as many
# Rows after each third step, validations and checkpoints after each eighth: they fall apart.
SETTINGS = (
    "data=text",
    "data.path=text.txt",
    "cache_dir=cache",
    "model.num_layers=2",
    "model.d_model=32",
    "model.num_heads=4",
    "model.context_length=32",
    "model.dropout=0.1",
    "batch_size=4",
    "accumulate=2",
    f"budget.steps={STEPS}",
    f"validation.count={VALIDATIONS}",
    "sample.tokens=4",
    "log_every=3",
    "trainer=cpu",
    "trainer.threads=1",
)
LIMIT_SECONDS = 600.0  # for one process of this size


@dataclass
class Result:
    """What became of a row: `broken` has a line for each promise that was not kept."""

    row: str
    tried: int = 0
    broken: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def check(self, kept: bool, what: str) -> None:
        if not kept:
            self.broken.append(f"{self.row} {self.tried}: {what}")

    def count(self, fact: str, number: float = 1) -> None:
        self.facts[fact] = self.facts.get(fact, 0) + number

    def largest(self, fact: str, number: float) -> None:
        self.facts[fact] = max(self.facts.get(fact, 0.0), round(number, 3))


def fingerprint(run: Path) -> str:
    """SHA-256 of a finished run's weights, optimizer and rows, times and speeds left out."""
    content = choose_checkpoint(RunFolder(run)).content
    sha = hashlib.sha256()
    tensors = dict(content["weights"])
    for parameter, state in content["optimizer"].items():
        tensors |= {f"{parameter}/{name}": tensor for name, tensor in state.items()}
    for name, tensor in sorted(tensors.items()):
        sha.update(name.encode() + tensor.contiguous().numpy().tobytes())
    for line in RunFolder(run).rows_file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        same = {k: v for k, v in row.items() if not k.startswith("perf/")}
        for name in ("time", "progress/seconds"):
            same.pop(name, None)
        sha.update(json.dumps(same, sort_keys=True).encode())
    return sha.hexdigest()


def unreadable(run: Path) -> int:
    """How many checkpoints have their final name and are not whole."""
    there = [path for path in RunFolder(run).known_checkpoints() if path.exists()]
    if not there:
        return 0
    chosen = choose_checkpoint(RunFolder(run))
    return sum(path in there for path, _ in chosen.passed_over)


class Process:
    """`train.py ARGUMENTS` in a process of its own: a fork of this one, which has torch already.

    `inside` is called in it first, and may change what the run will do.
    """

    def __init__(
        self, folder: Path, log: Path, arguments: tuple[str, ...], inside: Callable[[], object]
    ) -> None:
        self.log, self.start = log, time.monotonic()
        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=_run, args=(folder, log, arguments, inside))
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int:
        """Its exit code; that of a process which had to be killed after all."""
        self._process.join(LIMIT_SECONDS)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def wait_until(self, reached: Callable[[], bool]) -> bool:
        """Whether it came to that before it ended."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while self.poll() is None and time.monotonic() < deadline:
            if reached():
                return True
            time.sleep(0.001)
        return False

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def complaint(self) -> str:
        """The last line that begins like an error's."""
        lines = [line for line in self.text().splitlines() if line.startswith("error: ")]
        return lines[-1] if lines else ""


def _run(folder: Path, log: Path, arguments: tuple[str, ...], inside: Callable[[], object]) -> None:
    os.chdir(folder)
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(target, 1)
    os.dup2(target, 2)
    # The parent may ignore it, as what a shell starts in the background does.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["train.py", *arguments]
    inside()
    main()


def undisturbed() -> None:
    """Nothing is changed."""


class Bench:
    """A folder of runs; `random` is made anew for each try, from seed, row and number."""

    def __init__(self, folder: Path, seed: int, variants: Sequence[str] = VARIANTS) -> None:
        self.folder, self.seed, self.variants = folder, seed, variants
        self.random = random.Random(seed)
        self.whole: dict[str, str] = {}
        self._moments: dict[str, int] = {}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "text.txt").write_text(TEXT, encoding="utf-8")

    def draw(self, row: str, number: int) -> None:
        self.random = random.Random(f"{self.seed}/{row}/{number}")

    def start(
        self, name: str, *arguments: str, inside: Callable[[], object] = undisturbed
    ) -> Process:
        log = self.folder / f"{name.replace('/', '_')}.log"
        return Process(self.folder, log, arguments, inside)

    def begin(
        self, name: str, variant: str, *more: str, inside: Callable[[], object] = undisturbed
    ) -> Process:
        own = (f"attn={variant}", *SETTINGS, *more, f"hydra.run.dir={name}")
        return self.start(name, *own, inside=inside)

    def resume(self, name: str, inside: Callable[[], object] = undisturbed) -> Process:
        """Go on with the run, or begin it, where it was killed before it had settings."""
        if RunFolder(self.folder / name).begun:
            return self.start(name, f"resume={name}", inside=inside)
        return self.begin(name, self.variant_of(name), inside=inside)

    def variant_of(self, name: str) -> str:
        return self.variants[int(name.rpartition("_")[2]) % len(self.variants)]

    def expected(self, variant: str) -> str:
        if variant not in self.whole:
            name = f"whole_{variant}"
            process = self.begin(name, variant)
            if process.wait():
                raise RuntimeError(f"the undisturbed run of {variant} failed: {process.text()}")
            self.whole[variant] = fingerprint(self.folder / name)
        return self.whole[variant]

    def moments(self, kind: str) -> int:
        """How many of them an undisturbed run passes."""
        if kind not in self._moments:
            counted = Moments(kind)
            process = self.begin(f"count_{kind}", VARIANTS[0], inside=counted)
            if process.wait():
                raise RuntimeError(f"the run that counts {kind} failed: {process.text()}")
            self._moments[kind] = counted.passed
        return self._moments[kind]

    def finish(self, name: str, result: Result) -> Process:
        """Resume to the end, and compare."""
        run = self.folder / name
        process = self.resume(name)
        code = process.wait()
        result.check(code == 0, f"resume ended with {code}: {process.complaint()}")
        left = [str(path.relative_to(run)) for path in run.rglob("*.part")]
        result.check(not left, f"left behind: {left}")
        same = code == 0 and fingerprint(run) == self.expected(self.variant_of(name))
        result.check(same, "differs from the undisturbed run")
        result.count("exact", int(same))
        return process

    def check_whole(self, name: str, result: Result) -> None:
        bad = unreadable(self.folder / name)
        result.count("unreadable checkpoints", bad)
        result.check(bad == 0, f"{bad} checkpoints have their final name and are incomplete")

    def rows(self, name: str) -> int:
        try:
            return RunFolder(self.folder / name).rows_file.read_bytes().count(b"\n")
        except OSError:
            return 0

    def after_rows(self, name: str, process: Process) -> bool:
        """Wait until a random number of rows more is written; whether the process still runs."""
        rows = self.rows(name) + self.random.randint(1, EARLY_ROWS)
        if not process.wait_until(lambda: self.rows(name) >= rows):
            return False
        time.sleep(self.random.uniform(0, 0.03))
        return process.poll() is None
