"""Rows: which runs share one, how it is named, what notes say, and which is the baseline."""

import os
from typing import Any

import pytest
from reporting import groups_in, only_section, write_typed
from runfolders import write_run
from support import refuses

from gptattn.compare.comparison import pick_baseline
from gptattn.runs.folder import RunFolder
from gptattn.settings.compose import settings


def test_settings_that_change_no_result_do_not_separate_runs(tmp_path):
    config: dict[str, Any] = {"sweep": {"jobs": 2}, "experiment_name": "a", "allow_targets": ["x"]}
    write_run(tmp_path / "a", "mha", 1, 2.0, config=config)
    # 1000 steps given, and 1000 steps by default, are the same budget.
    budget = {"steps": 1000, "tokens": None, "default_steps": 500}
    write_run(tmp_path / "b", "mha", 2, 2.0, config={"budget": budget, "experiment_name": "b"})
    assert [len(members) for members in groups_in(tmp_path).values()] == [2]


ONE_HEAD = "attn=gqa attn.num_kv_heads=1"
ALIBI = "part=[gate,sink] position=alibi"
GATED = "attn=mqa part=[gate]"
WARM = "optim.warmup_fraction=0.2"
# Overrides as typed -> the row's name.
NAMES = [
    {"attn=mha": "mha", "attn=gqa": "gqa", ONE_HEAD: "gqa attn.num_kv_heads=1"},
    # Two heads are gqa's default, no dropout that of the model, learned that of GPT-2's block.
    {"attn=gqa attn.num_kv_heads=2": "gqa", ONE_HEAD: "gqa attn.num_kv_heads=1"},
    {"model.dropout=0.0": "mha", "model.dropout=0.1": "mha model.dropout=0.1"},
    {"position=learned": "mha", "position=none attn=mqa": "mqa position=none"},
    {
        "block=llama position=rope": "mha",  # there it is the default
        "block=llama position=none": "mha position=none",
    },
    # Left out is what all rows share, and what changes no result. Attention comes first.
    {
        "batch_size=8 log_every=2 attn=mqa": "mqa",
        f"batch_size=8 model.dropout=0.1 {ALIBI} attn=mha": f"mha {ALIBI} model.dropout=0.1",
        "batch_size=8 log_every=3 ++attn.out_proj=false": "mha attn.out_proj=false",
    },
    {
        "pattern=[sliding,gqa] model.num_layers=2": "pattern=[sliding,gqa]",
        "pattern=[gqa,mqa]": "pattern=[gqa,mqa]",
        "attn=mha": "mha",
    },
    {n: n for n in ("recipe=lfm2 layers.conv.attn.short_conv.conv_size=4", "recipe=lfm2")},
    {"recipe=gemma3": "recipe=gemma3", "recipe=qwen3": "recipe=qwen3"},
    {"name=mine attn=gqa": "mine", ONE_HEAD: "gqa attn.num_kv_heads=1"},
    {"name=mine attn=gqa": "mine attn=gqa", "name=mine attn=mqa": "mine attn=mqa"},
]


@pytest.mark.parametrize("names", NAMES)
def test_a_row_is_named_by_what_was_typed(names, tmp_path):
    for overrides in names:
        write_typed(tmp_path, overrides)
    rows = groups_in(tmp_path).items()
    assert {" ".join(run.overrides): name for name, runs in rows for run in runs} == names


def test_a_row_has_the_name_that_was_given_to_its_newest_run(tmp_path):
    for seed, name in enumerate(["", "name=first ", "name=mine "], start=1):
        run = write_typed(tmp_path, f"{name}attn=gqa", seed)
        os.utime(RunFolder(run).summary_file, (seed, seed))
    assert [*groups_in(tmp_path)] == ["mine"]


def test_a_name_that_cannot_be_printed_or_is_too_long_is_refused():
    for name, said in (("x" * 101, "100"), ("''", "blank"), ("'a\tb'", "printable")):
        with refuses(f"name: {said}"):
            settings([f"name={name}"])
    assert settings(["name=my attention"]).name == "my attention"


def test_a_given_name_makes_no_changed_row_the_baseline(tmp_path):
    found = only_section(tmp_path, "attn=mha", "name=local attn=mha attn.window=4")
    assert found.baseline == "mha"
    plain = only_section(tmp_path / "other", "name=plain attn=mha", "attn=mha attn.window=4")
    assert plain.baseline == "plain"


def test_equal_names_get_the_setting_that_differs(tmp_path):
    # Made from Python, without overrides.
    for i, size in enumerate([{"d_model": 64}, {"d_model": 128}, {"d_model": 128, "dropout": 0.1}]):
        write_run(tmp_path / str(i), "mha", 1, 2.0, **size)
    write_run(tmp_path / "other", "mha+gate", 1, 2.0)
    assert {*groups_in(tmp_path)} == {
        "mha model.d_model=64 model.dropout=0.0",
        "mha model.d_model=128 model.dropout=0.0",
        "mha model.d_model=128 model.dropout=0.1",
        "mha+gate",
    }


CHANGES = (
    *("model.mlp=relu2", "block.norm=rms", "block.zero_init=true", "optim.decay=linear"),
    *("optim=muon", "attn.window=4"),
)
# Overrides -> the row's name, the baseline's first; and what differs in more than attention.
ROWS = [
    ({"attn=mha": "mha"} | {f"attn=mha {one}": f"mha {one}" for one in CHANGES}, ""),
    ({GATED: "mqa"} | {f"{GATED} {one}": f"mqa {one}" for one in CHANGES}, ""),
    ({"attn=mha": "mha", "attn=gqa": "gqa", f"attn=mha {WARM}": f"mha {WARM}"}, ""),
    ({"attn=mha": "mha", GATED: "mqa part=[gate]", "pattern=[gqa,mqa]": "pattern=[gqa,mqa]"}, ""),
    ({"attn=mha": "mha", "attn=gqa block=llama": "gqa block=llama"}, "block"),
]


@pytest.mark.parametrize(("names", "other"), ROWS)
def test_rows_share_a_section_and_note_what_differs_with_the_attention(names, other, tmp_path):
    found = only_section(tmp_path, *names)
    assert {row.name for row in found.rows} == {*names.values()}
    assert found.baseline == next(iter(names.values()))
    assert [line.rpartition(": ")[2] for line in found.warnings] == [other] * bool(other)


def test_the_baseline_is_the_named_row_else_mha_else_the_shortest_name(tmp_path):
    for variant, width in (("mqa", 1), ("mqa", 2), ("gqa", 1), ("mha", 1)):
        write_run(tmp_path / f"{variant}{width}", variant, 1, 2.0, d_mlp=width)
    groups = groups_in(tmp_path)
    assert pick_baseline(groups, None) == "mha"
    assert pick_baseline(groups, "gqa") == "gqa"
    assert pick_baseline(groups, "mqa model.d_mlp=2") == "mqa model.d_mlp=2"
    assert pick_baseline(groups, "mqa") is None
    groups["mha position=none"] = groups["mha"]
    assert pick_baseline(groups, None) == "mha"
    del groups["mha"], groups["mha position=none"]
    assert pick_baseline(groups, None) == "gqa"
