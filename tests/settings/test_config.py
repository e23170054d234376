"""Every file in conf/ composes, and what it chooses can be built.

tests/attention/test_recipes.py builds the recipes.
"""

import json
from itertools import zip_longest

import numpy as np
import pytest
import torch
from building import settings as cached_settings
from docs_commands import OF_SHAKESPEARE
from support import TEXT, bpe

from gptattn.build.data import build_data
from gptattn.build.model import build_matrix_rule, build_model
from gptattn.settings.compose import CONF, settings
from gptattn.training.module import LanguageModel

# Groups whose files set what those of no other group do, so that one model has a file of each; the
# contract tests compose and build those of attn.
TOGETHER = ("block", "model", "optim", "trainer", "logger", "launcher", "data")


def files_of(group: str) -> list[str]:
    root = CONF / group
    return sorted(f.relative_to(root).with_suffix("").as_posix() for f in root.rglob("*.yaml"))


ROUNDS = [*zip_longest(*map(files_of, TOGETHER))]
# Runs of each experiment compose in test_experiments.py, which is slow too.
OTHERS = [
    *(("tokenizer", name) for name in files_of("tokenizer")),
    *(pytest.param("experiment", name, marks=pytest.mark.slow) for name in files_of("experiment")),
]


@pytest.fixture(scope="module")
def needs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The overrides without which an option does not work."""
    folder = tmp_path_factory.mktemp("data")
    book, rows, ids = folder / "book.txt", folder / "rows.jsonl", folder / "ids.bin"
    book.write_text(TEXT)
    rows.write_text("\n".join(json.dumps({"text": f"{i} {TEXT[:100]}"}) for i in range(99)))
    (np.arange(2000, dtype="<u2") % 100).tofile(ids)
    text = ["data=text", f"data.path={book}"]
    return {
        "data=text": text[1:],
        "data=hf": [f"data.path={rows}", "validation.fraction=0.2"],
        "data=bin": [f"data.path={ids}"],
        "data=package": ["data.name=networkx", "data.version=null"],  # a quarter of sympy's text
        "tokenizer=none": ["data=copy"],
        "tokenizer=gpt2": [f"tokenizer.path={(tokenizer := bpe(folder / 'bpe'))}"],
        "tokenizer=hf": [f"tokenizer.path={tokenizer}"],
    } | dict.fromkeys(OF_SHAKESPEARE, text)


@pytest.mark.parametrize("names", ROUNDS, ids=lambda names: names[-1])
def test_every_file_of_a_group_composes_and_builds(names, needs, tmp_path):
    choices = [f"{group}={name}" for group, name in zip(TOGETHER, names, strict=True) if name]
    # Of these, one is on the network, and one needs a plugin.
    choices = [o for o in choices if o not in ("data=shakespeare", "launcher=ray")]
    given = [more for choice in choices for more in needs.get(choice, [])]
    cfg = settings([*choices, *given, f"cache_dir={tmp_path}", "position=none"])
    data = build_data(cfg)
    with torch.device("meta"):
        model = build_model(cfg, data.tokenizer.vocab_size)
    module = LanguageModel(model, cfg, data, lambda step: 0.0, build_matrix_rule(cfg))
    assert module.configure_optimizers().param_groups


@pytest.mark.parametrize(("group", "name"), OTHERS)
def test_every_tokenizer_and_experiment_composes_and_builds(group, name, needs, tmp_path):
    choice = f"{group}={name}"
    cfg = settings([choice, f"cache_dir={tmp_path}", *needs.get(choice, ())])
    vocab_size = build_data(cfg).tokenizer.vocab_size if group == "tokenizer" else 256
    with torch.device("meta"):
        assert build_model(cfg, vocab_size).layers()


@pytest.mark.parametrize(
    "overrides",
    [
        "seed=3 attn=gqa attn.num_kv_heads=1 part=[gate,sink] part.gate.granularity=headwise",
        "position=rope position.base=1e5 part=sink block=llama block.norm_eps=1 trainer=cpu",
        "pattern=[sliding,gqa] attn.window=9 seed=2 optim.lr=1 budget.steps=null budget.tokens=99",
        "recipe=gemma3 model.d_model=96 part=[softcap] data=recall tokenizer=none sample.tokens=0",
        "match=params attn=mla attn.kv_rank=16 cache_dir=7 data=text data.path=/x.txt log_every=3",
        "optim=muon optim.matrices.momentum=0.5 experiment_name=2024 model=nano run_dir=here",
    ],
)
def test_the_settings_of_tests_are_those_that_hydra_composes(overrides):
    assert cached_settings(*overrides.split()) == settings(overrides.split())
