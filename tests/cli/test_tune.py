"""The learning-rate search, on a tiny model."""

import json
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from building import PROBE_CONFIGS
from support import Call, tiny


@pytest.fixture
def tune(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """Run the script in `tmp_path`, in this process: its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(PROBE_CONFIGS.parent))
    return partial(call, "tune")


@pytest.mark.slow
def test_the_search_names_the_best_rate_that_it_tried_and_goes_on_later(
    tmp_path: Path, tune: Call
) -> None:
    overrides = tiny(tmp_path, "checkpoint=false", "optim.warmup_fraction=0")
    arguments = ["--variants", "mqa", "--trials", "2", *overrides]
    code, out, err = tune(*arguments)
    assert (code, err) == (0, "")
    losses = {}
    for file in tmp_path.rglob("summary.json"):
        record = json.loads(file.read_text())
        losses[record["hyperparameters"]["lr"]] = record["metrics"]["val/loss"]
    assert len(losses) == 2
    best = min(losses, key=lambda lr: losses[lr])
    assert f"python train.py -m attn=mqa optim.lr={best:.4g} seed=1,2,3,4,5" in out
    again = tune(*arguments)[1]
    assert again.splitlines()[-2:] == out.splitlines()[-2:]
    assert len(list(tmp_path.rglob("summary.json"))) == 2


def test_a_mistake_is_one_line_before_anything_starts(tmp_path: Path, tune: Call) -> None:
    code, _, err = tune("--variants", "mha,gqaa", *tiny(tmp_path))
    assert code == 2
    assert err.startswith("error: attn: 'gqaa' is unknown; did you mean gqa?")
    assert not (tmp_path / "outputs").exists()


@pytest.mark.slow
def test_parts_follow_a_plus_and_the_printed_command_is_quoted_for_a_shell(
    tmp_path: Path, tune: Call
) -> None:
    menu = [f"hydra.searchpath=[file://{PROBE_CONFIGS}]", "allow_targets=[probe_parts]"]
    overrides = tiny(tmp_path, "checkpoint=false", *menu)
    code, out, err = tune("--variants", "gqa+probe_shift", "--trials", "1", *overrides)
    assert (code, err) == (0, "")
    (line,) = [line for line in out.splitlines() if line.startswith("python train.py")]
    words = shlex.split(line, comments=True)
    assert words[2:5] == ["-m", "attn=gqa", "part=[probe_shift]"]
    assert set(overrides) <= set(words)
    (record,) = tmp_path.rglob("summary.json")
    assert json.loads(record.read_text())["variant"] == "gqa+probe_shift"
