"""The check of each kind of layer before a run: what it refuses, and what it must not refuse."""

from dataclasses import replace
from typing import Any

import broken_layers
import pytest
import torch
import torch.nn.functional as F
from building import menu, settings, slow_but
from support import process_state, refuses, tiny
from torch import Tensor, nn

from gptattn.attention.foreign import ForeignAttention
from gptattn.build.model import build_model
from gptattn.errors import ConfigError
from gptattn.model.cost import measure_cost
from gptattn.settings.config import TrainConfig
from gptattn.training.contract import BrokenLayer, check_device, check_layers
from gptattn.training.run import train


def foreign(target: str, *overrides: str, **spec: Any) -> TrainConfig:
    """Settings whose attention is a class of tests/broken_layers.py, or one with a full name."""
    name = target if "." in target else f"broken_layers.{target}"
    allowed = ["broken_layers", "x_transformers"]
    return replace(settings(*overrides), attn={"_target_": name, **spec}, allow_targets=allowed)


@pytest.mark.parametrize("broken", broken_layers.BROKEN, ids=lambda one: one.__name__)
def test_a_broken_layer_is_refused_and_the_line_says_what_is_wrong(broken):
    with pytest.raises(ConfigError) as error:
        check_layers(foreign(broken.__name__))
    assert str(error.value).startswith(f"attn: {broken.__name__} ")
    assert broken.said in str(error.value)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize(
    ("broken", "said"),
    [("WrongInBfloat16", " differs by 0.2"), ("WrongGradientInBfloat16", "of up.")],
)
def test_a_layer_that_is_wrong_in_the_run_s_precision_is_refused(broken, said, precision, tmp_path):
    cfg, run = foreign(broken, f"trainer.precision={precision}", *tiny(tmp_path)), tmp_path / "run"
    assert check_layers(cfg) == []  # sound as such
    with process_state(), pytest.raises(BrokenLayer) as error:
        train(cfg, run)
    assert said in str(error.value)
    assert not run.exists()


SMALL = ("model.d_model=16", "model.num_heads=2", "model.dropout=0.3")


@pytest.mark.parametrize("attn", slow_but({"gqa", "dsa", "mamba2"}, menu("attn")))
def test_no_mechanism_of_the_menu_is_refused(attn):
    assert check_layers(settings(f"attn={attn}", *SMALL)) == []
    for precision in ("bf16-mixed", "bf16-true", "64-true"):
        cfg = settings(f"attn={attn}", f"trainer.precision={precision}", *SMALL)
        check_device(cfg)


@pytest.mark.slow
def test_no_part_is_refused_nor_layers_that_differ():
    assert check_layers(settings(f"part=[{','.join(menu('part'))}]", *SMALL)) == []
    assert check_layers(settings("pattern=[sliding,gqa]", "part=[value_residual]", *SMALL)) == []


@pytest.mark.parametrize(
    ("target", "spec"),
    [
        ("TorchAttention", {}),
        ("InFloat32", {}),
        ("RoundsStraightThrough", {}),
        ("DropsWholeRows", {}),
        ("ComputesAgain", {}),
        pytest.param(
            "x_transformers.x_transformers.Attention",
            {"dim": 64, "heads": 4, "dim_head": 16, "causal": True, "qk_norm": True},
            marks=pytest.mark.slow,  # to import
        ),
    ],
)
def test_a_sound_foreign_module_is_accepted_and_decodes_as_it_reads(target, spec):
    if target.startswith("x_"):
        pytest.importorskip("x_transformers")
    cfg = foreign(target, "model.dropout=0.2", **spec)
    assert check_layers(cfg) == []
    model = build_model(cfg, 13).double().eval()
    ids = torch.randint(13, (2, 9))
    with torch.no_grad():
        expected, cache = model(ids), model.new_cache(2)
        y = torch.cat([model(part, cache) for part in ids.split([4, 1, 4], 1)], 1)
        torch.testing.assert_close(y, expected, rtol=0, atol=1e-6)
        # Left padding: the second row has two ids fewer.
        cache = model.new_cache(2, padding_B=torch.tensor([0, 2]))
        padded = torch.cat([model(part, cache) for part in ids.split([5, 4], 1)], 1)
        torch.testing.assert_close(padded[1, 2:], model(ids[1:, 2:])[0], rtol=0, atol=1e-6)


def test_what_is_unusual_but_sound_is_noted():
    (note,) = check_layers(foreign("UnusedParameters"))
    assert note == "attn: UnusedParameters does not train its spare.weight, spare.bias"
    for name in ("WithoutGradient", "Zeros"):
        (note,) = check_layers(foreign(name))
        assert note == f"attn: {name} does not train its spare.weight, spare.bias"
    assert check_layers(foreign("IgnoresDropout")) == []
    (note,) = check_layers(foreign("IgnoresDropout", "model.dropout=0.1"))
    assert note.startswith("attn: IgnoresDropout takes dropout")


def test_a_module_with_a_fixed_size_passes_only_at_that_size():
    assert check_layers(foreign("OfItsOwnSize", "model.d_model=32")) == []
    with refuses("*: OfItsOwnSize was given x [2, 70, 64] float32", 1):
        check_layers(foreign("OfItsOwnSize"))


def test_the_flops_of_a_foreign_module_are_counted_by_hand():
    # Two Linear layers of 64 x 64, and scores and sums of all 16 x 16 pairs with 64 channels.
    module = broken_layers.TorchAttention(64, 64, 4)
    attention = ForeignAttention(module, 64, 64, 16)
    assert attention.flops(16, 16) == 2 * 2 * 16 * 16 * 64 + 2 * 16 * 3 * 64 * 64
    cost = measure_cost(build_model(foreign("Mixer"), 13))
    assert cost.kv_bytes_per_token is None


class Causal(nn.Module):
    """Attention on one row of two heads of 4 numbers, by torch's function or by a mask."""

    def __init__(self, *, masked: bool = False) -> None:
        super().__init__()
        self.given = {"attn_mask": torch.ones(16, 16).tril()} if masked else {"is_causal": True}

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, **self.given)


def test_flops_skip_pairs_torch_masks_and_a_module_can_count_its_own():
    # Of 16 x 16 pairs 136 are causal; 4 numbers in a score and 4 in a sum, in two heads.
    for masked, pairs in ((False, 136), (True, 256)):
        module = Causal(masked=masked)
        assert ForeignAttention(module, 8, 8, 16).flops(16, 16) == 2 * 2 * pairs * (4 + 4)
    module.flops = lambda T, S: 5 * T * S
    assert ForeignAttention(module, 8, 8, 16).flops(16, 16) == 5 * 256


def test_a_run_trains_around_a_layer_without_a_gradient(tmp_path):
    with process_state():
        assert train(foreign("WithoutGradient", *tiny(tmp_path)), tmp_path / "run")["metrics"]


def test_a_broken_layer_leaves_no_folder_and_checks_can_be_left_out(tmp_path):
    given, run = foreign("PeeksOneAhead", *tiny(tmp_path)), tmp_path / "run"
    with process_state(), refuses("attn: PeeksOneAhead"):
        train(given, run)
    assert not run.exists()
    with process_state():
        train(replace(given, checks=False), run)
    assert (run / "summary.json").exists()
