"""Every mistake in the settings of a run is one line that names its field, before a run starts.

The table is tried on composing and checking alone; tests/cli holds what a command makes of it.
"""

import re

import pytest
import torch
from building import settings as cached_settings
from support import check_job, refuses, tiny

from gptattn.errors import ConfigError
from gptattn.machine.ending import as_user_error
from gptattn.settings.messages import name_typed
from gptattn.training.preflight import preflight


def no_attention(out_proj: bool, scale: float | None, window: float | None, backend: str) -> None:
    """A target that builds no attention."""


# Overrides -> the field and a word of the message. What Hydra reads, or reading its files finds:
TYPED = {
    # Choices
    "attn=gqaa": ("attn", "gqa"),
    "attn=flash": ("attn", "attn.backend=sdpa"),
    "attn=mha,gqa": ("attn", "add -m to run each$"),
    "data=/a/b.txt": ("data", "data=text data.path=/a/b.txt"),
    "data=my.txt": ("data", "data=text data.path=my.txt"),
    "data=owner/name": ("data", "data=hf data.name=OWNER/NAME"),
    "attn=./mine.py": ("attn", "mine.py"),
    "+attn=mha": ("attn", "without the"),
    # Keys
    "batchsize=4": ("batchsize", "batch_size"),
    "attn=gqa attn.n_kv_heads=1": ("attn.n_kv_heads", "num_kv_heads"),
    "+seed=2": ("seed", "seed="),
    "~seed": ("seed", "removed"),
    "optim.lr='${no}'": ("optim.lr", "no"),
    # Types
    "seed=one": ("seed", "whole number"),
    "budget=3": ("budget", "budget.NAME"),
    "part={gate:3}": ("part.gate", "table"),
    "attn": ("attn", "name=value"),
    # Ranges, and what does not go together
    "model.mlp=none match=params": ("match", "model.mlp=none"),
    # What cannot be built
    "attn._target_=os.system": ("attn._target_", "os.system"),
    # Parts
    "part.softcap.cap=1": ("part.softcap", r"part=\[softcap\]"),
    # Patterns
    "pattern=[gqa,mq]": ("pattern", "mqa"),
    "pattern=[gqa,mqa,mha]": ("pattern", "model.num_layers=3"),
    "layers={near:{attn:sliding}}": ("layers", r"pattern=\[near\]"),
    "pattern=gqa": ("pattern", r"\[a,b\]"),
    "pattern=gqa,mqa": ("pattern", r"pattern=\[gqa,mqa\]"),
    "pattern=[gqa,mqa] pattern.gqa.window=8": ("pattern.gqa.window", "attn.NAME"),
    "pattern=[gqa,mqa] attn=gqa": ("attn", r"pattern=\[gqa,mqa\]"),
    "pattern=[gqa,gated_deltanet] attn.kv_rank=2": (
        "attn.kv_rank",
        "one of .*conv_size, .*num_kv_heads",
    ),
    "pattern=[gqa,mqa] model.num_heads=1": ("pattern.gqa.num_kv_heads", "num_heads=1"),
    # Tasks
    "tokenizer=byte data=recall sample.tokens=0": ("tokenizer", "data=recall"),
    "data=recall sample.tokens=5": ("sample.tokens", "data=recall"),
}
# What is found in settings that could be read.
MADE = {
    "trainer.precision=8-true": ("trainer.precision", "did you mean"),
    "attn=mha attn.num_kv_heads=2": ("attn.num_kv_heads", "MultiHeadAttention"),
    "attn.backend=3": ("attn.backend", "sdpa"),
    "budget.steps=0": ("budget.steps", "above 0"),
    "budget.tokens=5": ("budget", "budget.steps and budget.tokens"),
    "accumulate=3": ("accumulate", "multiple of 3"),
    "optim.decay_fraction=0.96": ("optim.decay_fraction", "optim.warmup_fraction"),
    "experiment_name=a/../b": ("experiment_name", "folder"),
    "model.vocab_size=255": ("model.vocab_size", "256"),
    "attn.d_in=3": ("attn.d_in", "model.d_model"),
    "model.d_model=65536 model.num_layers=4": ("model", "smaller"),
    "attn._target_=gptattn.attention.Nonesuch": ("attn._target_", "Nonesuch"),
    f"attn._target_={__name__}.no_attention": ("attn._target_", "torch.nn.modules"),
    f"attn._target_={__name__}.no_attention position=rope": ("position", "no_attention"),
    "data=text": ("data.path", "null"),
    "position._target_=gptattn.data.tokenizer.ByteTokenizer": ("position._target_", "HeadPosition"),
    "part=[sink] part.sink.foo=1": ("part.sink.foo", "Sink"),
    "part=[forget] position=alibi": ("part", "position=alibi"),
    "attn=mla part=[qk_norm,gate]": ("part", "qk_norm:"),
    "attn=gated_deltanet block=llama": ("position", "position=none"),
}
DATA_MISTAKES = {
    "tokenizer=char sample.prompt=Q": ("sample.prompt", r"U\+0051"),
    "tokenizer=char tokenizer.characters=Line": ("data", r"U\+0020"),
}


TABLE = TYPED | MADE | DATA_MISTAKES


@pytest.mark.parametrize("overrides", TABLE)
def test_a_mistake_names_its_field_and_what_would_be_right(overrides, tmp_path):
    two = () if "num_layers" in overrides else ("model.num_layers=2",)
    given = tiny(tmp_path, f"allow_targets=[{__name__}]", *two, *overrides.split())
    with pytest.raises(Exception) as caught:  # noqa: PT011
        preflight(cached_settings(*given)) if overrides in MADE else check_job(given)
    error = as_user_error(caught.value)
    assert error is not None, caught.value
    field, word = TABLE[overrides]
    assert error.field == field
    assert re.search(word, error.message), error
    assert "\n" not in str(error)
    assert error.exit_code == (3 if overrides in DATA_MISTAKES else 2)


@pytest.mark.parametrize(
    ("typed", "field", "word"),
    [
        ("model.d_model=18", "model.d_model", "num_heads=4"),
        ("attn=gqa model.num_heads=1", "model.num_heads", "num_kv_heads=2"),
        ("position=rope model.d_model=12", "model.d_model", "head_dim=3"),
        ("trainer.devices=3", "trainer.devices", "batch_size"),
        ("accumulate=3", "accumulate", "multiple of 3"),
        ("budget.steps=5 budget.seconds=5", "budget", "budget.steps and budget.seconds"),
        ("attn.window=17", "attn.window", "context_length=16"),
        ("pattern=[gqa,mqa] attn.num_kv_heads=3", "attn.num_kv_heads", "num_kv_heads=3"),
        ("recipe=qwen3 layers.full.attn.gqa.window=0", "layers.full.attn.gqa.window", "window=0"),
    ],
)
def test_a_mistake_names_the_setting_that_was_typed(typed, field, word, tmp_path):
    given = typed.split()
    with pytest.raises(ConfigError) as caught:
        preflight(cached_settings(*tiny(tmp_path, "model.num_layers=2", *given)))
    error = name_typed(caught.value, given)
    assert error.field == field
    assert word in error.message


def test_a_compiler_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with refuses("compile: C++"):
        preflight(cached_settings(*tiny(tmp_path, "compile=true")))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_named(tmp_path):
    with refuses("trainer: no GPU"):
        preflight(
            cached_settings(*(o for o in tiny(tmp_path) if o != "trainer=cpu"), "trainer=gpu")
        )
