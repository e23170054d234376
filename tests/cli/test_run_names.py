"""Run folders have readable, unique and safe names; values quoted for Hydra are read unchanged."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, ListConfig

from gptattn.cli.jobs import quoted, run_name


def named(
    attn: str,
    seed: int,
    overrides: list[str],
    pattern: list[str] | None = None,
    part: Sequence[str] = (),
) -> str:
    """The name of a run with these choices and overrides."""
    layers = None if pattern is None else ListConfig(pattern)
    return run_name(attn, layers, DictConfig(dict.fromkeys(part)), seed, ListConfig(overrides))


def test_run_names_tell_the_variant_the_changes_and_the_seed() -> None:
    name = named("gqa", 3, ["attn=gqa", "seed=3", "model=nano", "optim.lr=0.1"])
    assert re.fullmatch(r"gqa_s3,model=nano,optim\.lr=0\.1_[0-9a-f]{6}", name)
    assert re.fullmatch(r"mha_s0_[0-9a-f]{6}", named("mha", 0, []))


def test_a_name_begins_with_the_pattern_and_the_parts_and_says_them_once() -> None:
    given = ["part=[gate,sink]", "pattern=[sliding,gqa]", "part.gate.elementwise=true"]
    name = named("mha", 1, given, ["sliding", "gqa"], ["gate", "sink"])
    own = r"sliding,gqa\+gate\+sink_s1,part\.gate\.elementwise=true"
    assert re.fullmatch(own + r"_[0-9a-f]{6}", name)
    assert named("mha", 1, ["part=gate"], part=["gate"]).startswith("mha+gate_s1_")
    assert re.fullmatch(r"[\w,]{80}_s1_[0-9a-f]{6}", named("mha", 1, [], ["sliding", "gqa"] * 50))


def test_two_starts_never_share_a_name() -> None:
    names = {named("mha", 1, ["model=nano"]) for _ in range(50)}
    assert len(names) == 50


@pytest.mark.parametrize(
    "override",
    [
        "tokenizer.characters=a/../../b",
        "optim.lr='a b\n\t\0c'",
        "model=" + "long/" * 100,
        "tokenizer.characters=" + "語" * 300,
        "tokenizer.characters=" + "𠀀" * 300,
        "compile=$(touch x);`y`",
    ],
)
def test_run_names_are_safe_as_folder_names(override: str, tmp_path: Path) -> None:
    name = named("mha", 1, [override])
    assert not set(name) & set("/\\\0\n\t '\"$`;:*?<>|()")
    (tmp_path / name).mkdir()


@pytest.mark.parametrize("value", ["a,b=c_s1", "it's", "back\\slash", "sp ace", "x\\'y", "end\\"])
def test_aquoted_value_is_read_back_by_hydra(value: str) -> None:
    override = OverridesParser.create().parse_override(f"key={quoted(value)}")
    assert override.value() == value
