"""A sweep some of whose runs fail, each in a way of its own, and the same command again."""

import json
import os
import subprocess
import sys
from pathlib import Path

from gptattn.settings.compose import CONF
from gptattn.runs.folder import done_below
from tortures.bench import SETTINGS, Bench, Result

# Attention that fails as `faults.json` says for its seed, once it is trained.
MODULE = """
import json, os, signal, time
from pathlib import Path
import torch
from gptattn.attention.mha import MultiHeadAttention

class FaultyAttention(MultiHeadAttention):
    def forward(self, x, *args, **kwargs):
        out = super().forward(x, *args, **kwargs)
        file = Path(__file__).with_name("faults.json")
        if not self.training or x.is_meta or not file.exists():
            return out
        match json.loads(file.read_text()).get(os.environ.get("PL_GLOBAL_SEED")):
            case "exception":
                raise ValueError("this variant has a bug")
            case "nan":
                return out * float("nan")
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "exit":
                os._exit(0)
            case "hang":
                time.sleep(3600)
        return out
"""
FAULTS = {
    "exception": "ValueError: this variant has a bug",
    "nan": "train/loss: is nan",
    "kill": "killed by SIGKILL",
    "crash": "killed by SIGSEGV",
    "exit": "ended without a summary.json",
    "hang": "hang_seconds: no progress for 5 s",
}


def sweep(bench: Bench, count: int, result: Result) -> None:
    """`count` jobs, of which six fail in six ways; then the same command without the faults."""
    seeds = list(range(1, count + 1))
    bad = dict(zip(bench.random.sample(seeds, len(FAULTS)), FAULTS, strict=True))
    (bench.folder / "faulty.py").write_text(MODULE, encoding="utf-8")
    (bench.folder / "faults.json").write_text(json.dumps(bad), encoding="utf-8")
    result.tried = count
    code, text = _sweep(bench, seeds)
    home = bench.folder / "outputs" / "faulty"
    ends = _ends(home)
    failed = {run: entry for run, entry in ends.items() if entry["state"] == "failed"}
    done = sum(entry["state"] == "done" for entry in ends.values())
    result.facts |= {"finished": done, "failed": len(failed)}
    result.check(code not in (0, 143), f"the sweep ended with {code}")
    result.check(done == count - len(FAULTS), f"{done} have finished")
    reasons = {seed: entry["reason"] for run, entry in failed.items() for seed in [_seed(run)]}
    for seed, fault in bad.items():
        said = reasons.get(seed, "")
        result.check(FAULTS[fault] in said, f"{fault}: the ledger says {said!r}")
    result.check(
        "the same command runs them again" in text, "it does not say how to repeat the failed runs"
    )
    (bench.folder / "faults.json").unlink()
    before = len(_entries(home))
    code, text = _sweep(bench, seeds)
    again = {_seed(e["run"]) for e in _entries(home)[before:] if e["state"] == "running"}
    result.facts["run again"] = len(again)
    result.check(again == set(bad), f"ran again: seeds {sorted(again)}")
    result.check(code == 0, f"the second sweep ended with {code}: {text[-300:]}")
    finished = len(done_below(home))
    result.facts["finished in the end"] = finished
    result.check(finished == count, f"{finished} in the end")


def _sweep(bench: Bench, seeds: list[int]) -> tuple[int, str]:
    command = [
        *(sys.executable, str(CONF.parent / "train.py"), *SETTINGS, "-m", "attn=mha"),
        *("attn._target_=faulty.FaultyAttention", "allow_targets=[faulty]", "hang_seconds=5"),
        *(f"seed={','.join(map(str, seeds))}", "experiment_name=faulty"),
    ]
    places = [str(bench.folder), str(CONF.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, places))}
    ended = subprocess.run(
        command, cwd=bench.folder, env=environment, capture_output=True, text=True, check=False
    )
    return ended.returncode, ended.stdout + ended.stderr


def _entries(home: Path) -> list[dict[str, str]]:
    lines = (home / "ledger.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def _ends(home: Path) -> dict[str, dict[str, str]]:
    return {entry["run"]: entry for entry in _entries(home)}


def _seed(run: str) -> int:
    return int(run.rpartition("_s")[2].partition("_")[0])
