"""Conversions are exact where possible, and otherwise follow the paper's methods."""

from pathlib import Path

import pytest
import torch
from building import build_gpt
from support import Call, command, series, summary, tiny, train

from gptattn.attention.base import HeadWeights
from gptattn.errors import ConfigError
from gptattn.model.gpt import GPT
from gptattn.weights.convert import convert, convert_heads


def gpt(attn: str, seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    return build_gpt(*attn.split(" "), "model.d_model=24", std=0.1).double().eval()


@torch.no_grad()
def apart(a: GPT, b: GPT) -> float:
    ids = torch.randint(13, (2, a.context_length))
    return (a(ids) - b(ids)).abs().max().item()


FULL = "attn=gqa attn.num_kv_heads=4 model.num_heads=4"
LLAMA = "block=llama block.tied_head=false model.qkv_bias=false"
EXACT = [
    ("attn=mha", "attn=mha_wrapper"),
    ("attn=mha_wrapper", "attn=mha"),
    ("attn=mha model.num_heads=4", FULL),
    (FULL, "attn=mha_wrapper model.num_heads=4"),
    ("attn=gqa attn.num_kv_heads=1", "attn=mqa"),
    ("attn=mqa", "attn=gqa attn.num_kv_heads=1"),
    # Each key/value head is copied to all heads of its group.
    ("attn=mqa", "attn=mha"),
    ("attn=gqa", "attn=mha_wrapper"),
    (f"attn=mha {LLAMA}", f"attn=mha_wrapper {LLAMA}"),
    (f"attn=mqa {LLAMA}", f"attn=gqa attn.num_kv_heads=3 {LLAMA}"),
]


@pytest.mark.parametrize(("source", "target"), EXACT)
def test_an_exact_conversion_changes_no_logit(source, target):
    old, new = gpt(source, 1), gpt(target, 2)
    assert apart(old, new) > 0.1
    convert(old, new)
    assert apart(old, new) < 1e-12


def weights(kv: list[list[float]]) -> HeadWeights:
    """Four query heads and these key/value heads; head size 1, model width 2."""
    k = torch.tensor(kv, dtype=torch.float64).unsqueeze(1)
    q = torch.zeros(4, 1, 2, dtype=torch.float64)
    return HeadWeights(q, k, 10 * k, None, k[:, :, 0], None, None, None)


OLD = [[1.0, 2.0], [3.0, 6.0], [10.0, 0.0], [20.0, 8.0]]


@pytest.mark.parametrize(
    ("method", "count", "expected"),
    [
        ("mean", 2, [[2.0, 4.0], [15.0, 4.0]]),
        ("first", 2, [[1.0, 2.0], [10.0, 0.0]]),
        ("mean", 1, [[8.5, 4.0]]),
        ("first", 1, [[1.0, 2.0]]),
        ("mean", 4, OLD),
    ],
)
def test_merged_heads_are_the_mean_or_the_first_of_their_group(method, count, expected):
    new = convert_heads(weights(OLD), count, method, torch.Generator())
    expected = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(new.k_GDE[:, 0], expected)
    torch.testing.assert_close(new.v_GDE[:, 0], 10 * expected)
    torch.testing.assert_close(new.k_bias_GD[:, 0], expected[:, 0])
    assert new.v_bias_GD is None


def test_the_random_method_draws_gpt2s_spread_and_no_bias():
    wide = HeadWeights(
        *(torch.ones(4, 50, 100) for _ in range(3)), *3 * [torch.ones(4, 50)], None, None
    )
    new = convert_heads(wide, 2, "random", torch.Generator().manual_seed(3))
    assert new.k_GDE.shape == (2, 50, 100)
    assert new.k_GDE.std().item() == pytest.approx(0.02, rel=0.05)
    assert not new.k_bias_GD.any()
    again = convert_heads(wide, 2, "random", torch.Generator().manual_seed(3))
    assert torch.equal(again.v_GDE, new.v_GDE)


def test_a_count_that_does_not_divide_is_an_error():
    with pytest.raises(ValueError, match="4 key/value heads cannot become 3"):
        convert_heads(weights(OLD), 3, "mean", torch.Generator())


@pytest.mark.parametrize(
    ("source", "target", "said"),
    [
        ("attn=mha", f"attn=mha {LLAMA}", "differs, but only the attention may"),
        ("attn=mha block.tied_head=false", "attn=mha", "lm_head.weight differs"),
        ("attn=mha", "attn=gqa model.d_mlp=7", r"mlp\.(up|down)\.(weight|bias) differs"),
        ("attn=mha", "attn=mha model.num_layers=3", "blocks.2.* differs"),
        ("attn=mha", "attn=mha model.num_heads=2", "query heads of shape"),
        ("attn=mha", "attn=mha attn.out_proj=false", "output weight is present on one side only"),
        ("attn=mha", "attn=mha model.qkv_bias=false", "bias is present on one side only"),
    ],
)
def test_a_pair_that_cannot_be_converted_says_why(source, target, said):
    with pytest.raises(ConfigError, match=said):
        convert(gpt(source), gpt(target))


def test_training_goes_on_from_the_weights_of_another_run(tmp_path: Path) -> None:
    source = train(tmp_path / "a", "attn=mha", "budget.steps=30", "optim.lr=0.01")
    # At a learning rate near 0 the wrapper must have the validation loss of the source.
    still = ["attn=mha_wrapper", f"init_from={source}", "budget.steps=1", "optim.lr=1e-12"]
    target = train(tmp_path / "b", *still)
    before, after = (series(run, "val/loss")[-1][1] for run in (source, target))
    assert after == pytest.approx(before, abs=1e-5)
    assert summary(target)["init_from"] == str(source)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("source"))


SIZES = "error: init_from: SOURCE differs from this run; give"
NO_HEADS = "has no per-head weights to convert; only attentions with weights for each head, such as"


@pytest.mark.parametrize(
    ("overrides", "code", "said"),
    [
        (["init_from=none"], 4, "error: init_from: none is not a folder; give a run's, "),
        (["init_from=SOURCE/.."], 4, "error: init_from: SOURCE/.. holds no run; "),
        (["init_from=hf:gpt2"], 2, "error: init_from: 'hf:gpt2' is not a name on the hub; give "),
        (["init_from=SOURCE", "model.d_mlp=7"], 2, f"{SIZES} model.d_mlp=64\n"),
        (["init_from=SOURCE", "model.num_layers=2"], 2, f"{SIZES} model.num_layers=1\n"),
        (["init_from=SOURCE", "model.num_heads=2"], 2, f"{SIZES} model.num_heads=4\n"),
        (["init_from=SOURCE", "model.qkv_bias=false"], 2, f"{SIZES} model.qkv_bias=true\n"),
        (["init_from=SOURCE", "model.vocab_size=300"], 2, f"{SIZES} model.vocab_size=256\n"),
        (["init_from=SOURCE", "tokenizer=char"], 2, f"{SIZES} tokenizer=byte\n"),
        (
            ["init_from=SOURCE", "position=none", "model.d_model=32", "model.context_length=8"],
            2,
            f"{SIZES} position=learned model.d_model=16 model.context_length=16\n",
        ),
        (
            ["init_from=SOURCE", "attn=gated_deltanet", "position=none"],
            2,
            f"error: init_from: layer 0: attn=gated_deltanet {NO_HEADS}",
        ),
        (["init_from=SOURCE", "init_method=median"], 2, "error: init_method: 'median'"),
        (["init_from=SOURCE", "match=params"], 2, "error: match: params changes the MLP"),
    ],
)
def test_weights_that_cannot_be_taken_over_stop_the_run_before_it_starts(
    overrides: list[str],
    code: int,
    said: str,
    source: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    capfd.readouterr()
    overrides = [override.replace("SOURCE", str(source)) for override in overrides]
    assert command(tmp_path / "b", *tiny(tmp_path / "b", *overrides)) == code
    assert capfd.readouterr().err.startswith(said.replace("SOURCE", str(source)))
    assert not (tmp_path / "b" / "outputs").exists()


def test_a_run_without_heads_says_so_before_anything_else(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], call: Call
) -> None:
    run = train(tmp_path / "a", "attn=gated_deltanet")
    said = f"layer 0: attn=gated_deltanet {NO_HEADS} mha and gqa, exchange them\n"
    capfd.readouterr()
    other = tiny(tmp_path / "b", f"init_from={run}", "position=none")
    assert command(tmp_path / "b", *other, "attn=mha") == 2
    assert capfd.readouterr().err == f"error: init_from: {said}"
    # Of one mechanism the weights are copied by name, once the rest is the same.
    assert command(tmp_path / "b", *other, "attn=gated_deltanet") == 2
    assert capfd.readouterr().err.endswith("differs from this run; give position=learned\n")
    assert call("convert", f"from={run}", "to=hf")[::2] == (2, f"error: to: {said}")
