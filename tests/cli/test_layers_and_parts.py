"""`part=` and `pattern=` on the command line: from files, in names, in records and conversions."""

from pathlib import Path

import pytest
import yaml
from building import PROBE_CONFIGS
from support import Call, command, config, summary, tiny, train

MENU = (f"hydra.searchpath=[file://{PROBE_CONFIGS}]", "allow_targets=[probes,probe_parts]")


def test_a_pattern_of_a_file_and_attn_of_the_command_line_are_one_too_many(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine" / "experiment" / "layers.yaml"
    file.parent.mkdir(parents=True)
    text = "# @package _global_\npattern: [gqa, mqa]\n"
    flag = f"--config-dir={tmp_path / 'mine'}"
    given = tiny(tmp_path, "model.num_layers=2", "experiment=layers")
    said = "error: attn: cannot be combined with pattern=[gqa,mqa]"
    file.write_text(text, encoding="utf-8")
    assert command(tmp_path, flag, *given, "attn=gqa") == 2
    assert capfd.readouterr().err.startswith(said)
    file.write_text(text + "hydra: {sweeper: {params: {attn: 'gqa,mha'}}}\n", encoding="utf-8")
    assert command(tmp_path, "-m", flag, *given) == 2
    assert capfd.readouterr().err.startswith(said)


def test_the_way_out_of_a_pattern_with_another_setting_works(tmp_path: Path) -> None:
    file = tmp_path / "mine" / "attn" / "gqa1.yaml"
    file.parent.mkdir(parents=True)
    node = {"_target_": "gptattn.attention.GroupedQueryAttention", "num_kv_heads": 1}
    file.write_text(yaml.safe_dump(node | {"scale": None, "backend": "sdpa", "out_proj": True}))
    given = tiny(tmp_path, "model.num_layers=2", "pattern=[gqa1,mha]")
    assert command(tmp_path, f"--config-dir={tmp_path / 'mine'}", *given) == 0
    (run,) = (tmp_path / "outputs" / "scratch").iterdir()
    assert run.name.startswith("gqa1-mha_s1")
    assert config(run)["pattern_attn"]["gqa1"]["num_kv_heads"] == 1


def test_a_run_with_layers_that_differ_and_a_part_is_recorded_resumed_and_read(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], call: Call
) -> None:
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
    for change, said in (
        ("part=[]", "part: is ['probe_shift'] in this run and cannot change to []"),
        ("attn=mha", "attn: is gqa,mqa in this run and cannot change to mha"),
        ("pattern=[mqa,gqa]", "pattern: is ['gqa', 'mqa'] in this run"),
    ):
        assert command(tmp_path, *resume, change) == 2
        assert capfd.readouterr().err.startswith(f"error: {said}")
    same = ("part=[probe_shift]", "pattern=[gqa,mqa]", "part.probe_shift.start=0.0")
    assert command(tmp_path, *resume, *same, "budget.steps=6") == 0
    ask = (f"run={run}", "allow_targets=probe_parts", "prompt=Line", "tokens=20")
    assert "gqa,mqa+probe_shift" in call("generate", *ask)[2]


def test_a_conversion_puts_its_target_in_the_place_of_a_pattern(tmp_path: Path, call: Call) -> None:
    run = train(tmp_path / "a", "pattern=[gqa,mha]", "model.num_layers=2")
    code, out, _ = call("convert", f"from={run}", "to=mqa", f"out={tmp_path / 'b'}")
    assert (code, out.partition(":")[0]) == (0, "gqa,mha -> mqa")
    record = config(tmp_path / "b")
    assert (record["pattern"], record["pattern_attn"]) == (None, None)
    assert (record["choices"]["attn"], record["attn"]["num_kv_heads"]) == ("mqa", 1)


def test_a_pattern_of_one_name_is_the_run_with_attn(tmp_path: Path) -> None:
    run = train(tmp_path, "pattern=[gqa]", "model.num_layers=2")
    assert run.name.startswith("gqa_s1")
    record = config(run)
    assert (record["pattern"], record["choices"]["attn"]) == (None, "gqa")
    assert record["attn"]["num_kv_heads"] == 2
