"""A run composes its config once, loads its text once, and builds its model once on the meta device
and once for real; commands that do not need Hydra do not import it.
"""

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from interrupted import SIX
from support import command, run_folders, train

import gptattn.data.tokens
import gptattn.settings.build
from gptattn.model.gpt import GPT


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts how often each slow operation was done."""
    counts: Counter[str] = Counter()

    def counted(owner: Any, name: str, what: Callable[..., str]) -> None:
        real = getattr(owner, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            done = real(*args, **kwargs)
            counts[what(*args)] += 1
            return done

        monkeypatch.setattr(owner, name, noted)

    counted(ConfigLoaderImpl, "load_configuration", lambda *_: "compositions")
    counted(gptattn.settings.build, "load_tokens", lambda *_: "texts")
    counted(gptattn.data.tokens, "text_hash", lambda *_: "hashes")
    counted(GPT, "__init__", lambda model, *_: f"models: {model.token_embedding.weight.device}")
    return counts


ONCE = {"compositions": 1, "texts": 1, "hashes": 1, "models: meta": 1, "models: cpu": 1}


def test_a_run_composes_loads_and_builds_once(tmp_path: Path, made: Counter[str]) -> None:
    train(tmp_path, "attn=gqa")
    assert made == ONCE


def test_a_run_that_is_matched_builds_more_on_the_meta_device_alone(
    tmp_path: Path, made: Counter[str]
) -> None:
    train(tmp_path, "attn=gqa", "match=kv_cache")
    assert made.pop("models: meta") > 1
    assert made == {name: 1 for name in ONCE if name != "models: meta"}


def test_a_vocabulary_out_of_the_text_costs_a_second_model_on_the_meta_device(
    tmp_path: Path, made: Counter[str]
) -> None:
    train(tmp_path, "tokenizer=char")
    assert made == ONCE | {"models: meta": 2}


def test_a_run_that_goes_on_loads_and_builds_once(tmp_path: Path, made: Counter[str]) -> None:
    train(tmp_path, *SIX)
    made.clear()
    (run,) = run_folders(tmp_path)
    assert command(tmp_path, f"resume={run}", "budget.steps=8") == 0
    # One to check the checkpoint's header before a tensor is read, and one for the other checks.
    assert made.pop("models: meta") == 2
    assert made == {"texts": 1, "hashes": 1, "models: cpu": 1}


def test_weights_from_elsewhere_are_read_once(tmp_path: Path, made: Counter[str]) -> None:
    source = train(tmp_path / "a")
    made.clear()
    train(tmp_path / "b", f"init_from={source}", "attn=gqa")
    # One more on each device: the model that the source's weights are read into.
    assert made.pop("models: meta") == 2
    assert made == {"compositions": 1, "texts": 1, "hashes": 1, "models: cpu": 2}


def test_scripts_that_need_no_hydra_do_not_import_it_and_tell_a_mistake_without(
    tmp_path: Path,
) -> None:
    """All are imported by one process, torch takes long: the lines name the first that would."""
    code = (
        "import sys, importlib\n"
        "for name in ('compare', 'generate', 'convert', 'attention_map', 'evaluate'):\n"
        "    script = importlib.import_module(f'gptattn.cli.commands.{name}')\n"
        "    print(name, *{'hydra', 'omegaconf'} & sys.modules.keys())\n"
        "from gptattn.cli.commands import generate\n"
        f"sys.argv = ['generate', {f'run={tmp_path}'!r}, 'prompt=a']\n"
        "print(generate.main(), *{'hydra', 'omegaconf'} & sys.modules.keys())"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = ["compare", "generate", "convert", "attention_map", "evaluate"]
    assert ended.stdout.splitlines() == [*names, "4"]
    assert ended.stderr.startswith("error: run: ")
    assert len(ended.stderr.splitlines()) == 1
