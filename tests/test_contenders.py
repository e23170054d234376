"""What the benchmarks of attention time: layers with all that they leave for each other."""

import math

import pytest
import torch
from building import build_gpt, chosen, through_cache
from conftest import script
from contract import assert_same

from gptattn.attention import CacheGroup
from gptattn.model.gpt import Block

bench_attention, bench_decode = script("bench_attention"), script("bench_decode")
variants_page = script("variants_page")
Stack, stack_of = bench_attention.Stack, bench_attention.stack_of
CPU = bench_decode.Setting(torch.device("cpu"), [torch.float32], rounds=1, seed=0)
SHARED = ["cross_layer", "cross_layer:attn.share=3,model.num_layers=3", "mha+value_residual"]


@pytest.mark.parametrize("variant", ["cross_layer", "gqa+value_residual"])
def test_layers_in_a_row_do_what_the_model_does(variant: str) -> None:
    model = build_gpt(*chosen(variant), "model.num_layers=3", "position=none", std=0.3).double()
    stack, ids = Stack(model.layers()), torch.randint(13, (2, 7))

    def step(part: torch.Tensor, cache: CacheGroup) -> torch.Tensor:
        y = stack(part, cache)
        cache.advance(part.shape[1])
        return y

    with torch.no_grad():
        x = model.token_embedding(ids)
        assert_same(model.norm(stack(x)), model.hidden(ids))
        cached = through_cache(step, x, stack.new_cache(2, 7), [3, 1, 1, 2])
        assert_same(model.norm(cached), model.hidden(ids))


@pytest.mark.parametrize(
    ("name", "layers"), [("mha", 1), ("gated_deltanet", 1), *zip(SHARED, (2, 3, 2), strict=True)]
)
def test_one_layer_is_timed_unless_others_use_what_it_leaves(name: str, layers: int) -> None:
    with torch.device("meta"):
        stack = stack_of(name, 16)
    assert len(stack) == layers
    assert (layers > 1) == any(attention.needs() for attention in stack.attentions)


def test_the_page_of_the_menu_times_layers_with_what_passes_between_them() -> None:
    with torch.device("meta"):
        stacks = {
            one.key: variants_page.stack_of(one, 16)
            for one in variants_page.choices()
            if one.name in ("cross_layer", "gqa", "value_residual", "llama")
        }
    assert {len(stack) for stack in stacks.values()} == {2}
    taking = {key for key, stack in stacks.items() if any(a.needs() for a in stack.attentions)}
    assert taking == {"attn_cross_layer", "part_value_residual"}
    whole = {key for key, stack in stacks.items() if isinstance(stack.layers[0], Block)}
    assert whole == {"block_llama"}


@pytest.mark.parametrize("name", SHARED)
def test_times_are_those_of_one_layer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def six_seconds(step, *_, **__) -> float:
        step()
        return 6.0

    monkeypatch.setattr(bench_attention, "timed", six_seconds)
    monkeypatch.setattr(bench_decode, "step_seconds", six_seconds)
    stack = stack_of(name, 16)
    assert bench_attention.measure(lambda: stack, 1, 16, steps=1) == 6 / len(stack)
    assert bench_decode.layer_step(stack.eval(), CPU, 2, 16) == 6 / len(stack)
    assert bench_decode.attend_step(stack, CPU, 2, 16) == 6 / len(stack)


def test_what_is_no_softmax_attention_has_no_time_without_projections() -> None:
    stack = stack_of("gated_deltanet", 16)
    assert math.isnan(bench_decode.attend_step(stack, CPU, 2, 16))
