"""Breaks small runs in the ways that docs/reliability.md promises something about.

`python scripts/torture.py` takes about two minutes; `count=50` is each row at length, and
`row=kill` one row. A run that was broken and resumed must equal an undisturbed one to the last bit:
weights, optimizer and rows. The exit code is 1 where one does not.
"""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gptattn.cli.arguments import option, parse, run_script
from gptattn.runs.checkpoint import read_checkpoint
from gptattn.runs.folder import RunFolder
from gptattn.settings.values import check_choice

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
    """row=kill,signal,corrupt count=3 trainer=gpu"""

    row: tuple[str, ...] = option(
        "kill: SIGKILL at a random moment, twice; signal: SIGTERM; corrupt: a byte of the newest "
        "checkpoint changes",
        ("kill", "signal", "corrupt"),
    )
    count: int = option("how often, of each row", 3, least=1)
    seed: int = option("of the moments", 1, least=0)
    trainer: str = option("cpu, or gpu with trainer.deterministic=true", "cpu")


def fingerprint(run: Path) -> str:
    """Return a SHA-256 of a finished run's weights, optimizer and rows, but for times."""
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
    """Start a training command in the folder, its output in a file there."""
    with (folder / "output.txt").open("ab") as output:
        return subprocess.Popen([*TRAIN, *overrides], cwd=folder, stdout=output, stderr=output)


def begun(folder: Path, own: list[str], moment: float) -> subprocess.Popen[bytes]:
    """Start a run, and wait until it has come to this share of its steps."""
    process = start(folder, *TINY, *own, "run_dir=run")
    wait_for(folder / "run", process, moment)
    return process


def wait_for(run: Path, process: subprocess.Popen[bytes], moment: float) -> None:
    """Wait until the run has so many of its rows, or has ended."""
    rows = RunFolder(run).rows_file
    while process.poll() is None:
        if rows.exists() and rows.read_bytes().count(b"\n") > 2 + 26 * moment:
            return
        time.sleep(0.01)


def kill(folder: Path, own: list[str], chance: random.Random) -> None:
    """Kill the run at two moments, with a resume in between."""
    process = begun(folder, own, chance.random() / 2)
    process.kill()
    process.wait()
    process = start(folder, "resume=run")
    wait_for(folder / "run", process, 0.5 + chance.random() / 2)
    process.kill()
    process.wait()


def stop(folder: Path, own: list[str], chance: random.Random) -> None:
    """Ask the run to stop."""
    process = begun(folder, own, chance.random())
    process.send_signal(signal.SIGTERM)
    if process.wait() not in (0, 143):
        raise AssertionError(f"SIGTERM ended it with {process.returncode}, not 143")


def corrupt(folder: Path, own: list[str], chance: random.Random) -> None:
    """Stop the run, and change a byte of its newest checkpoint."""
    process = begun(folder, own, 0.6)
    process.kill()
    process.wait()
    newest = RunFolder(folder / "run").known_checkpoints()[0]
    data = bytearray(newest.read_bytes())
    data[chance.randrange(len(data))] ^= 1 + chance.randrange(255)
    newest.write_bytes(data)


ROWS: dict[str, Callable[[Path, list[str], random.Random], None]] = {
    "kill": kill,
    "signal": stop,
    "corrupt": corrupt,
}


def run(args: Arguments) -> None:
    """Break runs and resume them; raise AssertionError if one differs from an undisturbed one."""
    for row in args.row:
        check_choice("row", row, ROWS)
    check_choice("trainer", args.trainer, TRAINERS)
    chance = random.Random(args.seed)
    whole: dict[int, str] = {}
    with tempfile.TemporaryDirectory() as home:
        os.environ["OMP_NUM_THREADS"] = "1"
        for row in args.row:
            for i in range(args.count):
                variant = i % len(VARIANTS)
                own = [*VARIANTS[variant], *TRAINERS[args.trainer]]
                if variant not in whole:
                    folder = Path(home, f"whole{variant}")
                    folder.mkdir()
                    assert start(folder, *TINY, *own, "run_dir=run").wait() == 0, folder
                    whole[variant] = fingerprint(folder / "run")
                folder = Path(home, f"{row}{i}")
                folder.mkdir()
                ROWS[row](folder, own, chance)
                code = start(folder, "resume=run").wait()
                output = (folder / "output.txt").read_text()[-2000:]
                assert code == 0, f"{row}: {own} resumed with exit code {code}: {output}"
                same = fingerprint(folder / "run") == whole[variant]
                assert same, f"{row}: {own} differs from an undisturbed run"
            print(f"{row}: {args.count} equal to undisturbed runs", flush=True)


def main() -> int:
    """Run the command; return the exit code."""
    if len(sys.argv) == 1:
        sys.argv.append("count=3")
    return run_script(lambda arguments: run(parse(Arguments, arguments)), Arguments, __doc__)


if __name__ == "__main__":
    sys.exit(main())
