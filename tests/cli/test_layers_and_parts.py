"""`part=` and `pattern=` on the command line: from files, in names and in records."""

from building import PROBE_CONFIGS
from support import command, config, summary, train

from gptattn.runs.folder import name_run
from gptattn.settings.compose import settings

MENU = (f"hydra.searchpath=[file://{PROBE_CONFIGS}]", "allow_targets=[probes,probe_parts]")


def test_a_run_with_layers_that_differ_and_a_part_is_recorded_resumed_and_read(
    tmp_path, capfd, call
):
    layers = ("pattern=[gqa,mqa]", "part=[probe_shift]", "model.num_layers=2")
    run = train(tmp_path, *MENU, *layers)
    assert run.name.startswith("gqa-mqa+probe_shift_s1+model.d_model-16")
    record = config(run)
    assert (record["attn"], record["pattern"]) == ({}, ["gqa", "mqa"])
    assert summary(run)["variant"] == "gqa,mqa+probe_shift"
    shown = summary(run)["hyperparameters"]["attn_settings"]
    assert "gqa.num_kv_heads=2" in shown
    assert "probe_shift.start=0.0" in shown
    capfd.readouterr()
    resume = [MENU[0], f"resume={run}", "allow_targets=[probe_parts]"]
    for change in ("part=[]", "attn=mha", "pattern=[mqa,gqa]"):
        assert command(tmp_path, *resume, change) == 2
        name = change.partition("=")[0]
        assert capfd.readouterr().err.startswith(f"error: {name}: is fixed once a run has begun")
    assert command(tmp_path, *resume, "budget.steps=6") == 0
    ask = (f"run={run}", "allow_targets=probe_parts", "prompt=Line", "tokens=20")
    assert "gqa,mqa+probe_shift" in call("generate", *ask)[2]


def test_a_pattern_of_one_name_is_the_run_with_attn():
    cfg, plain = settings(["pattern=[gqa]"]), settings(["attn=gqa"])
    assert cfg == plain
    assert name_run(cfg, ["pattern=[gqa]"]).startswith("gqa_s1_")
