"""The learning-rate search, on a tiny model."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

from building import PROBE_CONFIGS
from support import tiny

from gptattn.cli.compose import CONF

SCRIPT = CONF.parent / "scripts" / "tune.py"


def tune(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"PYTHONPATH": str(PROBE_CONFIGS.parent)},
    )


def test_the_search_names_the_best_rate_that_it_tried_and_goes_on_later(tmp_path: Path) -> None:
    overrides = tiny(tmp_path, "checkpoint=false", "optim.warmup_fraction=0")
    arguments = ["--variants", "mqa", "--trials", "2", *overrides]
    done = tune(tmp_path, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    losses = {}
    for file in tmp_path.rglob("summary.json"):
        record = json.loads(file.read_text())
        losses[record["hyperparameters"]["lr"]] = record["metrics"]["val/loss"]
    assert len(losses) == 2
    best = min(losses, key=lambda lr: losses[lr])
    assert f"python train.py -m attn=mqa optim.lr={best:.4g} seed=1,2,3,4,5" in done.stdout
    again = tune(tmp_path, *arguments)
    assert again.stdout.splitlines()[-2:] == done.stdout.splitlines()[-2:]
    assert len(list(tmp_path.rglob("summary.json"))) == 2


def test_a_mistake_is_one_line_before_anything_starts(tmp_path: Path) -> None:
    done = tune(tmp_path, "--variants", "mha,gqaa", *tiny(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith("error: attn: 'gqaa' is unknown; did you mean gqa?")
    assert not (tmp_path / "outputs").exists()


def test_parts_follow_a_plus_and_the_printed_command_is_quoted_for_a_shell(tmp_path: Path) -> None:
    menu = [f"hydra.searchpath=[file://{PROBE_CONFIGS}]", "allow_targets=[probe_parts]"]
    overrides = tiny(tmp_path, "checkpoint=false", *menu)
    done = tune(tmp_path, "--variants", "gqa+probe_shift", "--trials", "1", *overrides)
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("python train.py")]
    words = shlex.split(line, comments=True)
    assert words[2:5] == ["-m", "attn=gqa", "part=[probe_shift]"]
    assert set(overrides) <= set(words)
    (record,) = tmp_path.rglob("summary.json")
    assert json.loads(record.read_text())["variant"] == "gqa+probe_shift"
