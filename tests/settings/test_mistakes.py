"""Every mistake in the settings of a run is one line that names its field, before a run starts.

The table is tried on composing and checking alone; tests/cli holds what a command makes of it.
"""

import re

import pytest
import torch
from building import settings as cached_settings
from support import check_job, tiny

from gptattn.errors import ConfigError
from gptattn.machine.ending import as_user_error
from gptattn.settings.messages import name_typed
from gptattn.training.preflight import preflight

ONE_TOO_MANY = r"cannot be combined with pattern=\[gqa,mqa\], which names .*; leave one of them out"


def no_attention(out_proj: bool, scale: float | None, window: float | None, backend: str) -> None:
    """A target that builds no attention."""


# Overrides -> the beginning of the line, as a regular expression. What Hydra reads, or reading its
# files finds:
TYPED = {
    # Choices
    "attn=gqaa": r"attn: 'gqaa' is unknown; did you mean gqa\? one of .*sliding",
    "attn=flash": r"attn: 'flash' is unknown; did you mean attn.backend=sdpa\?",
    "attn=mha,gqa": r"attn: mha,gqa gives several values; add -m to run each, or",
    "+attn=mha": r"attn: takes one choice; write attn=... without the \+",
    # Keys
    "batchsize=4": r"batchsize: is not a setting; did you mean batch_size\?",
    "attn=gqa attn.n_kv_heads=1": r"attn.n_kv_heads: .* did you mean num_kv_heads\?",
    "+seed=2": r"seed: already exists; write seed=... without the \+",
    "~seed": r"seed: cannot be removed; give it a value instead",
    # Types
    "seed=one": r"seed: 'one' is a str; give a whole number",
    "model.num_layers=null": r"model.num_layers: is null; give a whole number",
    "attn": r"attn: cannot be read; write name=value",
    # Ranges, and what does not go together
    "model.mlp=none match=params": r"match: params changes the MLP's width, but model.mlp=none",
    # What cannot be built
    "attn._target_=os.system": r"attn._target_: os.system is outside of gptattn",
    # Parts
    "part.softcap.cap=1": r"part.softcap: is not chosen; give part=\[softcap\] as well",
    # Patterns
    "pattern=[gqa,mq]": r"pattern: 'mq' is not in conf/attn; did you mean mqa",
    "pattern=[gqa,mqa,mha]": (
        r"pattern: the 3 layers of gqa,mqa,mha do not fit model.num_layers=2; give model.num_l"
    ),
    "pattern=gqa": r"pattern: 'gqa' is a str; give a list, as \[a,b\]",
    "pattern=[gqa,mqa] attn=gqa": rf"attn: {ONE_TOO_MANY}$",
    "pattern=[gqa,gated_deltanet] attn.kv_rank=2": (
        r"attn.kv_rank: no attention in pattern=\[gqa,gated_deltanet\] has it; gqa has "
        r"num_kv_heads, out_proj, scale, window, backend; gated_deltanet has conv_size, "
    ),
    "pattern=[gqa,mqa] model.num_heads=1": (
        r"pattern.gqa.num_kv_heads: num_kv_heads=2 must divide num_heads=1; one of \[1\]"
    ),
    # Tasks
    "tokenizer=byte data=recall sample.tokens=0": r"tokenizer: data=recall has its own ids",
    "data=recall sample.tokens=5": r"sample.tokens: data=recall has no text",
}
# What is found in settings that could be read.
MADE = {
    "trainer.precision=8-true": r"trainer.precision: '8-true' is unknown; did you mean",
    "attn=mha attn.num_kv_heads=2": r"attn.num_kv_heads: MultiHeadAttention takes no such arg",
    "attn.backend=3": r"attn.backend: '3' is unknown; one of",
    "budget.steps=0": r"budget.steps: 0 is not a positive number; give one above 0",
    "budget.tokens=5": r"budget: budget.steps and budget.tokens are both set",
    "accumulate=3": r"accumulate: 3 does not divide batch_size=4; one of \[1, 2, 4\]",
    "optim.decay_fraction=0.96": r"optim.decay_fraction: 0.96 and optim.warmup_fraction=",
    "experiment_name=a/../b": r"experiment_name: 'a/../b' is not a folder name",
    "model.vocab_size=255": r"model.vocab_size: 255 is below the 256 ids of the data",
    "attn.d_in=3": r"attn.d_in: comes from the model; set model.d_model instead",
    "model.d_model=65536 model.num_layers=4": r"model: .* use a smaller model",
    "attn._target_=gptattn.attention.Nonesuch": r"attn._target_: gptattn.attention has no Nonesuch",
    f"attn._target_={__name__}.no_attention": r"attn._target_: is not a torch.nn.modules",
    f"attn._target_={__name__}.no_attention position=rope": (
        r"position: rope \(from block=gpt2 if .*\) acts in the attention, and no_attention takes "
        r"no position; use position=learned, position=sinusoidal or position=none"
    ),
    "data=text": r"data.path: is null; give str",
    "position._target_=gptattn.data.tokenizer.ByteTokenizer": r"position._target_: is neither",
    "part=[sink] part.sink.foo=1": r"part.sink.foo: Sink takes no such argument; there is none$",
    "part=[forget] position=alibi": r"part: forget cannot be used with position=alibi: .*slope",
    "attn=mla part=[qk_norm,gate]": (
        r"part: attn=mla keeps no keys and values of each head that a part could change, so it "
        r"cannot take qk_norm; leave that out, or"
    ),
    "attn=gated_deltanet block=llama": (
        r"position: rope \(from block=llama if you did not choose it\) acts on queries and keys, "
        r"and attn=gated_deltanet knows the order of the tokens without them; use position=none, "
        r"position=learned or position=sinusoidal$"
    ),
}
DATA_MISTAKES = {
    "tokenizer=char sample.prompt=Q": r"sample.prompt: character 'Q' \(U\+0051\), after ''",
    "tokenizer=char tokenizer.characters=Line": r"data: character ' ' \(U\+0020\), after 'Line'",
}


def check_made(*overrides: str) -> None:
    """Check these settings as a run's start does, without Hydra's part in it."""
    preflight(cached_settings(*overrides))


TABLE = TYPED | MADE | DATA_MISTAKES


@pytest.mark.parametrize("overrides", TABLE)
def test_a_mistake_names_its_field_and_what_would_be_right(overrides, tmp_path):
    two = () if "num_layers" in overrides else ("model.num_layers=2",)
    given = tiny(tmp_path, f"allow_targets=[{__name__}]", *two, *overrides.split())
    with pytest.raises(Exception) as caught:  # noqa: PT011
        check_made(*given) if overrides in MADE else check_job(given)
    error = as_user_error(caught.value)
    assert error is not None, caught.value
    assert re.match(TABLE[overrides], str(error)), error
    assert error.exit_code == (3 if overrides in DATA_MISTAKES else 2)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (
            "model.d_model=18",
            "model.d_model: 18 is not a multiple of model.num_heads=4; give 16 or 20",
        ),
        (
            "attn=gqa model.num_heads=1",
            "model.num_heads: 1 is not a multiple of attn.num_kv_heads=2; give 2",
        ),
        (
            "position=rope model.d_model=12",
            "model.d_model: 12 does not go with model.num_heads: head_dim=3 (model.d_model / "
            "num_heads) must be even",
        ),
        ("trainer.devices=3", "trainer.devices: 3 does not go with batch_size: 4 sequences"),
        ("attn.window=17", "attn.window: window=17 does not fit context_length=16; give 1 to 16"),
        ("pattern=[gqa,mqa] attn.num_kv_heads=3", "attn.num_kv_heads: num_kv_heads=3 must divide"),
    ],
)
def test_a_mistake_names_the_setting_that_was_typed(typed, said, tmp_path):
    given = typed.split()
    with pytest.raises(ConfigError) as caught:
        check_made(*tiny(tmp_path, "model.num_layers=2", *given))
    assert str(name_typed(caught.value, given)).startswith(said)


@pytest.mark.parametrize(
    "overrides",
    [
        "model.dropout=0.999 optim.weight_decay=0 optim.final_lr_fraction=0 sample.tokens=0",
        "optim.warmup_fraction=0 seed=4294967295 accumulate=4 experiment_name=mine/again",
        "model.d_mlp=1 model.vocab_size=256 budget.steps=null budget.tokens=1 attn.scale=1",
        "budget.steps=null budget.seconds=0.1 attn.scale=0.5",
    ],
)
def test_a_value_at_its_limit_is_accepted(overrides, tmp_path):
    check_made(*tiny(tmp_path, *overrides.split()))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_named(tmp_path):
    with pytest.raises(Exception, match=r"^trainer: no GPU is visible"):
        check_made(*(o for o in tiny(tmp_path) if o != "trainer=cpu"), "trainer=gpu")
