"""Rows: which runs share one, what names and notes say of them, and which is the baseline."""

from pathlib import Path
from typing import Any

import pytest
from reporting import groups_in, only_section
from runfolders import write_run

from gptattn.compare.groups import pick_baseline

POSITIONS: dict[str, dict[str, Any]] = {
    "rope": {"_target_": "gptattn.Rotary", "base": 10000.0, "original_context": None},
    "learned": {"_target_": "gptattn.Learned"},
    "none": {},
}
BLOCKS = {
    "gpt2": ({"norm": "layer", "bias": True}, {"mlp": "gelu", "qkv_bias": True}, "learned"),
    "llama": ({"norm": "rms", "bias": False}, {"mlp": "swiglu", "qkv_bias": False}, "rope"),
}


def write(folder: Path, variant: str, position: str = "learned", **more: Any) -> None:
    """Write a run; `window` is of attn, all else of position."""
    name = f"{variant} {position} {more}"
    config = {
        "attn": {"_target_": f"gptattn.{variant}", "window": more.pop("window", None)},
        "position": POSITIONS[position] | more,
    }
    write_run(folder / name, variant, 1, 2.0, config=config, choices={"position": position})


def write_block(folder: Path, variant: str, block: str) -> None:
    settings, model, position = BLOCKS[block]
    config = {"block": settings, "model": model, "position": POSITIONS[position]}
    choices = {"block": block, "position": position}
    write_run(folder / f"{variant} {block}", variant, 1, 2.0, config=config, choices=choices)


def test_settings_that_change_no_result_do_not_separate_runs(tmp_path):
    config: dict[str, Any] = {"sweep": {"jobs": 2}, "experiment_name": "a", "allow_targets": ["x"]}
    write_run(tmp_path / "a", "mha", 1, 2.0, config=config)
    # 1000 steps given, and 1000 steps by default, are the same budget.
    budget = {"steps": 1000, "tokens": None, "default_steps": 500}
    write_run(tmp_path / "b", "mha", 2, 2.0, config={"budget": budget, "experiment_name": "b"})
    assert [len(members) for members in groups_in(tmp_path).values()] == [2]


def test_a_config_file_names_a_row_if_it_explains_the_difference(tmp_path):
    def run(name: str, model: str, d_model: int, num_layers: int) -> None:
        size = {"d_model": d_model, "num_layers": num_layers}
        write_run(tmp_path / name, "mha", 1, 2.0, choices={"model": model}, **size)

    run("a", "tiny", 64, 2)
    run("b", "nano", 128, 4)
    assert {*groups_in(tmp_path)} == {"mha model=tiny", "mha model=nano"}
    run("c", "nano", 256, 4)
    assert "mha model.d_model=256 model.num_layers=4" in groups_in(tmp_path)


def test_a_positions_setting_is_shown_only_if_another_run_has_that_position(tmp_path):
    write(tmp_path, "mha")
    write(tmp_path, "mha", "none")
    write(tmp_path, "mha", "rope")
    write(tmp_path, "mha", "rope", base=500.0)
    assert {*groups_in(tmp_path)} == {
        "mha position=learned",
        "mha position=none",
        "mha position=rope position.base=10000.0",
        "mha position=rope position.base=500.0",
    }


@pytest.mark.parametrize("variant", ["mha", "mqa+gate"])
def test_rows_of_an_ablation_are_named_by_what_they_change(variant, tmp_path):
    block: dict[str, Any] = {"norm": "rms", "zero_init": True}
    optim: dict[str, Any] = {
        "decay": "linear",
        "matrices": {"_target_": "gptattn.optim.Muon", "steps": 3},
        "lr": 0.1,
    }
    whole = {"model": {"mlp": "swiglu"}, "optim": optim, "attn": {"window": 4}, "block": block}
    changes: dict[str, dict[str, Any]] = {
        "": {},
        " model.mlp=relu2": {"model": {"mlp": "relu2"}},
        " block.norm=layer": {"block": block | {"norm": "layer"}},
        " block.zero_init=False": {"block": block | {"zero_init": False}},
        " optim.decay=cosine": {"optim": optim | {"decay": "cosine"}},
        " optim.matrices=None": {"optim": optim | {"matrices": None}},
        " attn.window=None": {"attn": {"window": None}},
    }
    for name, change in changes.items():
        write_run(tmp_path / f"run{name}", variant, 1, 2.0, config=whole | change)
    found = only_section(tmp_path)
    assert {row.name for row in found.rows} == {f"{variant}{name}" for name in changes}
    assert found.baseline == variant
    assert found.warnings == []


def test_parts_and_the_layers_of_a_pattern_are_attention(tmp_path):
    configs: dict[str, dict[str, Any]] = {
        "mha": {"part": {}, "pattern": None},
        "mha+gate": {"part": {"gate": {"_target_": "Gate", "wide": True}}},
        "gqa,mqa": {"pattern": ["gqa", "mqa"], "layers": {"gqa": {"attn": {"num_kv_heads": 2}}}},
    }
    for variant, config in configs.items():
        write_run(tmp_path / variant, variant, 1, 2.0, config=config)
    found = only_section(tmp_path)
    assert {row.name for row in found.rows} == {*configs}
    assert found.baseline == "mha"
    assert found.warnings == []


def test_blocks_name_the_rows_of_one_variant_and_are_noted_between_variants(tmp_path):
    for variant, block in (("mha", "gpt2"), ("mha", "llama")):
        write_block(tmp_path / "one", variant, block)
    one = only_section(tmp_path / "one")
    assert one.baseline == "mha block=gpt2 position=learned"
    assert one.rows[1].name == "mha block=llama position=rope"
    assert one.warnings == []
    for variant, block in (("mha", "gpt2"), ("gqa", "llama"), ("mqa", "llama")):
        write_block(tmp_path / "several", variant, block)
    said = "the variants differ in more than attention"
    assert only_section(tmp_path / "several").warnings == [
        f"{said}: block (llama: 2 runs; gpt2: 1 run)",
        f"{said}: position (rope: 2 runs; learned: 1 run)",
    ]


def test_differing_positions_share_one_note(tmp_path):
    write(tmp_path, "mha")
    write(tmp_path, "gqa", "rope")
    write(tmp_path, "mqa", "rope", base=500.0)
    (note,) = only_section(tmp_path).warnings
    said, _, values = note.removesuffix(")").partition(" (")
    assert said == "the variants differ in more than attention: position"
    assert {*values.split("; ")} == {
        "learned: 1 run",
        "rope base=10000.0: 1 run",
        "rope base=500.0: 1 run",
    }


def test_a_confound_is_noted_even_if_it_names_some_rows(tmp_path):
    for i, (variant, warmup) in enumerate([("gqa", 3), ("mha", 1), ("mha", 2), ("mqa", 3)]):
        write_run(tmp_path / str(i), variant, 1, 2.0, config={"optim": {"warmup": warmup}})
    found = only_section(tmp_path)
    assert {"mha optim.warmup=1", "mha optim.warmup=2"} < {row.name for row in found.rows}
    assert len([line for line in found.warnings if "optim.warmup" in line]) == 1


def test_the_baseline_is_the_named_row_or_mha_or_the_most_typical_row(tmp_path):
    for variant, width in (("mqa", 1), ("mqa", 2), ("gqa", 1), ("mha", 1)):
        write_run(tmp_path / f"{variant}{width}", variant, 1, 2.0, d_mlp=width)
    groups = groups_in(tmp_path)
    assert pick_baseline(groups, None) == "mha"
    assert pick_baseline(groups, "gqa") == "gqa"
    assert pick_baseline(groups, "mqa model.d_mlp=2") == "mqa model.d_mlp=2"
    assert pick_baseline(groups, "mqa") is None
    del groups["mha"]
    assert pick_baseline(groups, None) == "mqa model.d_mlp=1"


@pytest.mark.parametrize(("others", "position"), [((), "none"), (("gqa", "mqa"), "learned")])
def test_the_baseline_is_the_most_typical_row_of_mha(others, position, tmp_path):
    write(tmp_path, "mha")
    # In name order, "mha attn..." would come first.
    write(tmp_path, "mha", "none", window=4)
    write(tmp_path, "mha", "none")
    for variant in others:
        write(tmp_path, variant)
    assert pick_baseline(groups_in(tmp_path), None) == f"mha position={position}"
