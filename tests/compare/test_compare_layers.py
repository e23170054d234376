"""Parts, patterns and blocks in the report: what is called attention, and what stands apart."""

from pathlib import Path
from typing import Any

from reporting import compared
from runfolders import write_run

GPT2 = {
    "block": {"norm": "layer", "bias": True},
    "model": {"mlp": "gelu", "qkv_bias": True, "d_mlp": None},
    "position": {"_target_": "Learned"},
}
LLAMA = {
    "block": {"norm": "rms", "bias": False},
    "model": {"mlp": "swiglu", "qkv_bias": False, "d_mlp": None},
    "position": {"_target_": "Rope", "base": 10_000.0},
}
BLOCKS = {"gpt2": (GPT2, "learned"), "llama": (LLAMA, "rope")}


def write(folder: Path, variant: str, block: str, **more: Any) -> None:
    settings, position = BLOCKS[block]
    choices = {"attn": variant.partition("+")[0], "block": block, "position": position}
    for seed, loss in enumerate((2.0, 2.1, 2.3), start=1):
        config = {**settings, "choices": choices, **more}
        write_run(folder / f"{block}_{variant}_{seed}", variant, seed, loss, config=config)


def test_parts_and_the_layers_of_a_pattern_are_attention(tmp_path: Path) -> None:
    write(tmp_path, "mha", "gpt2", part={}, pattern=None)
    write(tmp_path, "mha+gate", "gpt2", part={"gate": {"_target_": "Gate", "wide": True}})
    layers = {"pattern": ["gqa", "mqa"], "pattern_attn": {"gqa": {"num_kv_heads": 2}}}
    write(tmp_path, "gqa,mqa", "gpt2", **layers)
    (section,) = compared(tmp_path).sections
    assert {row.name for row in section.rows} == {"mha", "mha+gate", "gqa,mqa"}
    assert section.baseline == "mha"
    assert section.warnings == []


def test_blocks_with_several_variants_are_sections_with_their_own_baselines(
    tmp_path: Path,
) -> None:
    for block in BLOCKS:
        for variant in ("mha", "gqa"):
            write(tmp_path, variant, block)
    found = compared(tmp_path).sections
    assert {section.title for section in found} == {"block=gpt2", "block=llama"}
    for section in found:
        assert [row.name for row in section.rows] == ["mha", "gqa"]
        assert section.warnings == []


def test_one_variant_in_two_blocks_is_two_rows(
    tmp_path: Path,
) -> None:
    for block in BLOCKS:
        write(tmp_path, "mha", block)
    (section,) = compared(tmp_path).sections
    assert section.baseline == "mha block=gpt2 position=learned"
    assert section.rows[1].name == "mha block=llama position=rope"
    assert section.warnings == []


def test_other_blocks_and_positions_are_noted_in_one_line_each(tmp_path: Path) -> None:
    write(tmp_path, "mha", "gpt2")
    write(tmp_path, "gqa", "llama")
    write(tmp_path, "mqa", "llama")
    (section,) = compared(tmp_path).sections
    said = "the variants differ in more than attention"
    assert section.warnings == [
        f"{said}: block (llama: 6 runs; gpt2: 3 runs)",
        f"{said}: position (rope: 6 runs; learned: 3 runs)",
    ]
