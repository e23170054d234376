"""Probes in whole models: layers that differ, and that pass tensors on."""

from pathlib import Path

import pytest
from building import WITH_PROBES, build_gpt
from support import Call, rows, summary, train
from torch import nn

from gptattn.model.cost import measure_cost

T = 11


def test_each_layer_is_built_counted_and_kept_for_itself():
    model = build_gpt("attn=probe_alternating")
    first, second = (block.attention for block in model.layers())
    assert type(first) is not type(second)
    cache = model.new_cache(1)
    # A state of 6 heads of 5 x 5 and 5; a ring of 4 places, keys and values of 1 head of 5.
    assert [c.nbytes for c in cache.caches] == [4 * 6 * (25 + 5), 4 * 2 * 4 * 5]
    cost = measure_cost(model)
    mix = first.flops(T, T) + second.flops(T, T)
    matrices = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    assert cost.flops_per_token == 3 * (2 * (matrices + 13 * 30) + mix / T)
    assert model.layers_with_maps() == [1]


def test_a_run_without_maps_says_so_once_and_is_refused_by_name(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], call: Call
) -> None:
    run = train(tmp_path, *WITH_PROBES, "attn=probe_linear_state", "model.num_layers=2")
    out = capfd.readouterr().out
    assert out.count("attention: 0 of 2 layers have weights to record") == 1
    assert not [name for row in rows(run) for name in row if "val_attention" in name]
    assert summary(run)["metrics"]["val/loss"] > 0
    ask = (f"run={run}", "allow_targets=probes", "prompt=Line")
    code, _, err = call("attention_map", *ask)
    assert code == 2
    assert err == (
        "error: run: attn=probe_linear_state has no attention weights to show; give another run\n"
    )
