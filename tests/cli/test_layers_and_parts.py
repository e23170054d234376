"""`part=` and `pattern=` on the command line: from files, in names and in records."""

from dataclasses import replace

from support import command, config, summary, train

from gptattn.settings.compose import settings


def test_a_run_with_mixed_layers_and_a_part_is_recorded_resumed_and_read(tmp_path, call):
    run = train(tmp_path, "pattern=[gqa,gated_deltanet]", "part=[gate]", "model.num_layers=2")
    assert run.name.startswith("gqa-gated_deltanet+gate_s1+")
    record = config(run)
    assert (record["attn"], record["pattern"]) == ({}, ["gqa", "gated_deltanet"])
    assert summary(run)["variant"] == "gqa,gated_deltanet+gate"
    assert command(tmp_path, f"resume={run}", "budget.steps=6") == 0
    assert "gqa,gated_deltanet+gate" in call("generate", f"run={run}", "prompt=Line", "tokens=3")[2]


def test_a_setting_reaches_a_layer_whose_constructor_takes_it():
    plain = settings(["attn=gqa"])
    assert replace(settings(["pattern=[gqa]"]), overrides=plain.overrides) == plain
    # Neither file has qkv_bias, which model.qkv_bias fills otherwise.
    cfg = settings(["pattern=[gqa,mha]", "attn.qkv_bias=false", "attn.num_kv_heads=1"])
    assert [one["attn"]["qkv_bias"] for one in cfg.layers.values()] == [False, False]
    assert ["num_kv_heads" in one["attn"] for one in cfg.layers.values()] == [True, False]
