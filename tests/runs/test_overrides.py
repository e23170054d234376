"""From records back to commands: what is named makes the same runs, and else nothing is named."""

import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import pytest
from building import settings as cached_settings

from gptattn.runs.folder import RunFolder
from gptattn.runs.overrides import sweep_command
from gptattn.settings.compose import settings
from gptattn.settings.config import TrainConfig
from gptattn.settings.identity import flat, places, settings_key
from gptattn.sweep.jobs import list_jobs


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def record(name: str, cfg: TrainConfig, home: str = "outputs/scratch") -> Path:
    """Write a record as a run with these settings does; return its folder."""
    folder = Path(home, name)
    folder.mkdir(parents=True)
    RunFolder(folder).write_settings(replace(cfg, seed=1))
    return folder


def words_of(command: str) -> list[str]:
    """The overrides of a sweep's command, which is a script in the source tree."""
    program, found, words = command.partition(" -m ")
    assert program in ("python train.py", "gptattn-train")
    assert found
    return shlex.split(words)


def made_by(command: str) -> list[str]:
    """The keys of the runs that a command's sweep makes, as it plans them."""
    jobs = list_jobs(cast(Any, None), words_of(command), None)
    nodes = [asdict(cached_settings(*job.overrides)) for job in jobs]
    return sorted(settings_key(node) + repr(places(flat(node))) for node in nodes)


def test_the_command_makes_the_finished_runs_and_those_at_the_other_seeds():
    shared = ("attn=gqa", "budget.seconds=1.5", "data=text", "data.path='a, b.txt'")
    variants = [settings([*shared, value]) for value in ("part=[]", "part=[qk_norm,gate]")]
    runs = [record(f"{i}", one) for i, one in enumerate(variants)]
    command = sweep_command(runs, [1, 2])
    assert command.startswith("gptattn-train -m 'part=[],[qk_norm,gate]' seed=1,2")
    wanted = [asdict(replace(one, seed=seed)) for one in variants for seed in (1, 2)]
    assert made_by(command) == sorted(settings_key(w) + repr(places(flat(w))) for w in wanted)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (["attn=mha"], ["attn=gqa", "optim.lr=0.01"]),  # two differences
        (["attn=mha"], ["attn=gqa", "match=params"]),
    ],
)
def test_without_a_single_known_difference_no_command_is_named(first, second):
    runs = [record("a", settings(first)), record("b", settings(second))]
    assert sweep_command(runs, [1, 2, 3]) is None
