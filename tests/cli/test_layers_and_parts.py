"""`part=`, `pattern=`, `block=` and windows on the command line: choices, mistakes and names."""

import re
from pathlib import Path

import pytest
import yaml
from building import PROBE_CONFIGS
from support import Call, command, config, summary, tiny, train

MENU = (f"hydra.searchpath=[file://{PROBE_CONFIGS}]", "allow_targets=[probes,probe_parts]")
PARTS = "one of .*probe_shift, probe_stretch"

# Overrides -> the beginning of the line, as a regular expression. A sweep's begin with -m.
MISTAKES = {
    # Parts
    "part=[probe_shif]": f"part: 'probe_shif' is unknown; did you mean probe_shift\\? {PARTS}",
    "part=probe_shif": f"part: 'probe_shif' is unknown; did you mean probe_shift\\? {PARTS}",
    "part=null": r"part: does not take null",
    "part=3": "part: does not take 3",
    "part=[probe_shift,null]": r"part: does not take \[probe_shift,null\]",
    "part=[probe_shift@x]": "part: 'probe_shift@x' is unknown; did you mean probe_shift",
    "part=probe_shift,probe_stretch": r"part: .* several values; write part=\[probe_shift,prob",
    "~part": "part: cannot be removed; give it a value instead",
    "part.probe_shift.start=1": (
        r"part.probe_shift: is not chosen; give part=\[probe_shift\] as well"
    ),
    "+part.probe_shift.start=1": (
        r"part.probe_shift: is not chosen; give part=\[probe_shift\] as well"
    ),
    "part=[probe_shift] part.probe_shift.stat=1": (
        "part.probe_shift.stat: Shift takes no such argument; did you mean start"
    ),
    "part=[sink] part.sink.foo=1": "part.sink.foo: Sink takes no such argument; there is none$",
    "part=[probe_shift] +part.probe_shift.stat=1": (
        "part.probe_shift.stat: Shift takes no such argument; did you mean start"
    ),
    "part=[probe_shift] part.probe_shift.start=x": "part.probe_shift.start: 'x' is a str; give a n",
    "part=[probe_shift] part.probe_shift.start=3": "part.probe_shift.start: start=3 must lie in",
    "part=[probe_shift,probe_stretch]": (
        "part: probe_shift cannot be used with probe_stretch: both act on the mix"
    ),
    "part=[probe_stretch,probe_shift]": "part: probe_shift cannot be used with probe_stretch",
    "part=[probe_shift] position=none": (
        "part: probe_shift cannot be used with position=none: it needs positions"
    ),
    "part=[probe_stretch] attn=probe_linear_state": (
        "part: attn=probe_linear_state has no heads of queries, keys and values, so it cannot take "
        "probe_stretch"
    ),
    "-m part=[],[probe_shif]": "part: 'probe_shif' is unknown; did you mean probe_shift",
    "part=[forget] position=alibi": "part: forget cannot be used with position=alibi: both lower",
    "part=[qk_norm] attn=probe_linear_state position=none": "part: attn=probe_linear_state has no",
    # Patterns
    "pattern=[gqa,mq]": "pattern: 'mq' is not in conf/attn; did you mean mqa",
    "pattern=[gqa,mqa,mha]": (
        r"pattern: 3 names do not fit model.num_layers=2, .*; give as many as one of \[1, 2\]"
    ),
    "pattern=[]": "pattern: is empty",
    "pattern=gqa": r"pattern: is not a list; write pattern=\[a,b\]",
    "pattern=sliding,gqa": r"pattern: sliding,gqa gives several values; write pattern=\[sli",
    "+attn=mha": r"attn: takes one choice; write attn=... without the \+",
    "pattern=[gqa,sliding] attn.window=4": (
        r"attn.window: has .*; leave one of them out, or change a copy of its file: copy "
        r"conf/attn/NAME.yaml to DIR/attn/NEW.yaml and give --config-dir=DIR$"
    ),
    "attn=gated_deltanet attn.window=8": "attn.window: GatedDeltaNet takes no such argument",
    "pattern=[mha,gqa] attn.num_kv_heads=1": "attn.num_kv_heads: has no place beside",
    "pattern=[null,gqa]": r"pattern\[0\]: .* NoneType is not a subclass of str",
    "pattern=[3,gqa]": "pattern: '3' is not in conf/attn",
    "pattern=[gqa,mqa] attn=gqa": (
        r"attn: has no place beside pattern=\[gqa,mqa\], which names .*; leave one of them out"
    ),
    "attn=gqa pattern=[gqa,mqa]": "attn: has no place beside",
    "attn.backend=reference pattern=[gqa,mqa]": "attn.backend: has no place beside",
    "-m attn=gqa,mha pattern=[gqa,mqa]": "attn: has no place beside",
    "pattern=[gqa,mqa] pattern_attn.gqa.num_kv_heads=1": "pattern_attn.gqa.num_kv_heads: does not",
    "pattern=[gqa,mqa] model.num_heads=1": (
        r"pattern: gqa.num_kv_heads: num_kv_heads=2 must divide num_heads=1; one of \[1\]"
    ),
    "pattern=[gqa,probe_linear_state] position=rope": (
        r"position: rope \(from block=gpt2 if .*\) acts in the attention, and probe_linear_state "
        "takes no position; use position=learned or"
    ),
    # Windows and heads
    "attn.window=0": "attn.window: window=0 does not fit context_length=16; give 1 to 16",
    "attn.window=17": "attn.window: window=17 does not fit context_length=16; give 1 to 16",
    "attn=sliding attn.window=1.5": "attn.window: window=1.5 does not fit context_length=16",
    "attn=sliding attn.window=x": "attn.window: 'x' is a str; give a number or null",
    "attn.window=true": "attn.window: True is a bool; give a number or null",
    "attn.window='256'": "attn.window: '256' is a str; give a number or null",
    "-m attn=sliding attn.window=4,0": "attn.window: window=0 does not fit context_length=16",
    "position=rope model.d_model=12": (
        "model.num_heads: head_dim=3 \\(model.d_model / num_heads\\) must be even for rotary pos"
    ),
    # Parts that no layer takes, and positions that no layer uses
    "attn=mla part=[qk_norm,gate]": (
        "part: attn=mla keeps no keys and values of each head that a part could change, so it "
        "cannot take qk_norm; leave that out, or"
    ),
    "attn=gated_deltanet block=llama": (
        r"position: rope \(from block=llama if you did not choose it\) acts on queries and keys, "
        "and attn=gated_deltanet knows the order of the tokens without them; use position=none, "
        "position=learned or position=sinusoidal$"
    ),
    # Blocks
    "block=lama": "block: 'lama' is unknown; did you mean llama",
    "model.mlp=none match=params": "match: params changes the MLP's width, but model.mlp=none",
}


@pytest.mark.parametrize("overrides", MISTAKES)
def test_a_mistake_is_one_line_before_anything_is_written(
    overrides: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    *flags, settings = overrides.partition("-m ")[1:] if "-m " in overrides else (overrides,)
    given = tiny(tmp_path, *MENU, "model.num_layers=2", *settings.split())
    assert command(tmp_path, *(flag.strip() for flag in flags), *given) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert re.match(f"error: {MISTAKES[overrides]}", line), line
    assert not (tmp_path / "outputs").exists()


def test_a_pattern_of_a_file_and_attn_of_the_command_line_are_one_too_many(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine" / "experiment" / "layers.yaml"
    file.parent.mkdir(parents=True)
    text = "# @package _global_\npattern: [gqa, mqa]\n"
    flag = f"--config-dir={tmp_path / 'mine'}"
    given = tiny(tmp_path, "model.num_layers=2", "experiment=layers")
    said = "error: attn: has no place beside pattern=[gqa,mqa]"
    file.write_text(text, encoding="utf-8")
    assert command(tmp_path, flag, *given, "attn=gqa") == 2
    assert capfd.readouterr().err.startswith(said)
    file.write_text(text + "hydra: {sweeper: {params: {attn: 'gqa,mha'}}}\n", encoding="utf-8")
    assert command(tmp_path, "-m", flag, *given) == 2
    assert capfd.readouterr().err.startswith(said)


def test_a_part_without_its_package_line_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine" / "part" / "own.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("_target_: probe_parts.Stretch\n", encoding="utf-8")
    given = tiny(tmp_path, *MENU, "part=[own]")
    assert command(tmp_path, f"--config-dir={file.parents[1]}", *given) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: command line: In 'part/own': ")


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


@pytest.mark.parametrize("choice", ["part=probe_shift", "part=[probe_shift]"])
def test_one_part_needs_no_brackets(choice: str, tmp_path: Path) -> None:
    assert list(config(train(tmp_path, *MENU, choice))["part"]) == ["probe_shift"]
