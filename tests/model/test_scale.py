"""What many GPUs take, against sums worked out by hand."""

import pytest
import torch
from building import CONTRACT, build_gpt, chosen
from torch._subclasses.fake_tensor import FakeTensorMode

from gptattn.model.scale import Machine, activation_bytes, plan

B, T, E, H, L, V = 3, 16, 8, 2, 5, 13
SIZES = [
    f"model.num_layers={L}",
    f"model.d_model={E}",
    f"model.num_heads={H}",
    f"model.context_length={T}",
]


def test_what_gpt2_keeps_is_as_counted_by_hand() -> None:
    """Korthikanti et al. 2022, sec. 4.1, in float32, without dropout and without scores."""
    N = B * T
    norm = N * (E + 2)  # its input, the mean and the deviation
    attention = N * (E + 3 * E + E + H)  # input; q, k, v; output; sums of exponentials
    mlp = N * (E + 4 * E + 4 * E)  # input, before and after GELU
    ids = 2 * N  # of 8 bytes
    logits = N * V * 3  # log-probabilities, product, its gradient
    joined = 3 * E * E  # the matrices of queries, keys and values, side by side for one product
    block = norm + attention + joined + norm + mlp
    model = build_gpt("attn=mha", *SIZES)
    assert activation_bytes(model, B, torch.float32) == 4 * (ids + L * block + norm + logits)
    model.recompute = True
    inputs = L * N * E
    assert activation_bytes(model, B, torch.float32) == 4 * (ids + inputs + block + norm + logits)
    assert model.recompute


@pytest.mark.parametrize("variant", CONTRACT)
def test_nothing_need_be_computed_to_count_it(variant: str) -> None:
    with FakeTensorMode():
        fake = activation_bytes(build_gpt(*chosen(variant), *SIZES), B, torch.bfloat16)
    assert fake == activation_bytes(build_gpt(*chosen(variant), *SIZES), B, torch.bfloat16)


def test_a_step_is_computing_and_what_it_does_not_hide() -> None:
    model = build_gpt("attn=mha", *SIZES)
    params = sum(p.numel() for p in model.parameters())
    fast = Machine(devices=4, nodes=2, flops=1e9, mfu=0.5, link=1e18, network=1e18)
    alone = plan(model, Machine(1, 1, 1e9, 0.5, 1.0, 1.0), 8 * T, rows=1)
    shared = plan(model, fast, 8 * T, rows=1)
    assert (alone.state, alone.exchanged) == (16 * params, 0)
    assert alone.step == alone.computing == pytest.approx(8 * shared.step)
    assert shared.exchanged == pytest.approx(2 * 7 / 8 * 4 * params)
    # So slow that the backward pass, 2 of 3 parts of the step, hides next to nothing.
    far = Machine(4, 2, 1e9, 0.5, link=1e18, network=1.0)
    slow = plan(model, far, 8 * T, rows=1)
    assert slow.exchanging == pytest.approx(7 * params)
    assert slow.step == pytest.approx(7 * params + slow.computing / 3)
    # Of two rows, one after the other, only the second one's hides anything.
    twice = plan(model, far, 16 * T, rows=1)
    assert twice.step == pytest.approx(7 * params + twice.computing * 2 / 3)


def test_recomputing_takes_the_forward_pass_twice() -> None:
    model, one = build_gpt("attn=mha", *SIZES), Machine(1, 1, 1e9, 0.5, 1.0, 1.0)
    kept = plan(model, one, T, rows=1).step
    model.recompute = True
    assert plan(model, one, T, rows=1).step == pytest.approx(4 / 3 * kept)
