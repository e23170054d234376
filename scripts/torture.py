"""Kills small runs at random moments, twice each, and resumes them.

Takes about a minute; use `count=50` for a long test. A run that was killed and resumed must equal
an undisturbed one to the last bit: weights, optimizer and rows. The exit code is 1 if one differs.
"""

import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gptattn.cli.arguments import Count, Seed, option, parse, run_script
from gptattn.runs.checkpoint import read_checkpoint
from gptattn.runs.folder import RunFolder

TRAIN = [sys.executable, str(Path(__file__).parents[1] / "train.py")]
TINY = [
    "model=tiny",
    "model.d_model=32",
    "model.context_length=32",
    "budget.steps=60",
    "validation.count=6",
    "log_every=7",
    "accumulate=2",
    "model.dropout=0.1",
    "sample.tokens=8",
    "trainer.threads=1",
]
TRAINERS = {"cpu": ["trainer=cpu"], "gpu": ["trainer=gpu", "trainer.deterministic=true"]}
VARIANTS = (
    ["attn=mha", "accumulate=4"],
    ["attn=gqa", "optim=muon"],
    ["attn=mla", "position=rope"],
    ["data=induction", "sample.tokens=0"],
    ["attn=gated_deltanet", "position=none"],
)


@dataclass(frozen=True)
class Arguments:
    """count=3 trainer=gpu"""

    count: Count = option("how many runs to kill", 3)
    seed: Seed = option("seed of the random moments", 1)
    trainer: Literal["cpu", "gpu"] = option("gpu also sets trainer.deterministic=true", "cpu")


def fingerprint(run: Path) -> str:
    """Return a SHA-256 of a finished run's weights, optimizer and rows, without times."""
    content = read_checkpoint(RunFolder(run).known_checkpoints()[0])
    sha = hashlib.sha256()
    for name, tensor in sorted(content["state_dict"].items()):
        sha.update(name.encode() + tensor.numpy().tobytes())
    for number, state in sorted(content["optimizer_states"][0]["state"].items()):
        for name, tensor in sorted(state.items()):
            sha.update(f"{number} {name}".encode() + tensor.numpy().tobytes())
    for line in RunFolder(run).rows_file.read_text(encoding="utf-8").splitlines():
        row = {k: v for k, v in json.loads(line).items() if not k.startswith("perf/")}
        row = {k: v for k, v in row.items() if k not in ("time", "progress/seconds")}
        sha.update(json.dumps(row, sort_keys=True).encode())
    return sha.hexdigest()


def start(folder: Path, *overrides: str) -> subprocess.Popen[bytes]:
    """Start a training command in the folder; its output goes to a file there."""
    with (folder / "output.txt").open("ab") as output:
        return subprocess.Popen([*TRAIN, *overrides], cwd=folder, stdout=output, stderr=output)


def wait_for(run: Path, process: subprocess.Popen[bytes], moment: float) -> None:
    """Wait until the run has written this share of its rows, or has ended."""
    rows = RunFolder(run).rows_file
    while process.poll() is None:
        if rows.exists() and rows.read_bytes().count(b"\n") > 2 + 26 * moment:
            return
        time.sleep(0.01)


def kill(folder: Path, overrides: list[str], chance: random.Random) -> None:
    """Kill the run, resume it, and kill it again."""
    commands = ([*TINY, *overrides, "run_dir=run"], ["resume=run"])
    for command, earliest in zip(commands, (0, 0.5), strict=True):
        process = start(folder, *command)
        wait_for(folder / "run", process, earliest + chance.random() / 2)
        process.kill()
        process.wait()


def run(arguments: Sequence[str]) -> None:
    """Kill runs and resume them; raise AssertionError if one differs from an undisturbed run."""
    args = parse(Arguments, arguments)
    chance = random.Random(args.seed)
    whole: dict[int, str] = {}
    with tempfile.TemporaryDirectory() as home:
        os.environ["OMP_NUM_THREADS"] = "1"
        for i in range(args.count):
            variant = i % len(VARIANTS)
            overrides = [*VARIANTS[variant], *TRAINERS[args.trainer]]
            if variant not in whole:
                folder = Path(home, f"whole{variant}")
                folder.mkdir()
                assert start(folder, *TINY, *overrides, "run_dir=run").wait() == 0, folder
                whole[variant] = fingerprint(folder / "run")
            folder = Path(home, f"{i}")
            folder.mkdir()
            kill(folder, overrides, chance)
            code = start(folder, "resume=run").wait()
            output = (folder / "output.txt").read_text()[-2000:]
            assert code == 0, f"{overrides} resumed with exit code {code}: {output}"
            same = fingerprint(folder / "run") == whole[variant]
            assert same, f"{overrides} differs from an undisturbed run"
        print(f"killed and resumed {args.count} runs: all equal undisturbed ones", flush=True)


if __name__ == "__main__":
    sys.exit(run_script(run, Arguments))
