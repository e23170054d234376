"""Run folders have readable, unique and safe names; values quoted for Hydra are read unchanged."""

import re
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import ListConfig

from gptattn.cli.jobs import quoted, run_name


def test_run_names_tell_the_variant_the_changes_and_the_seed() -> None:
    name = run_name("gqa", 3, ListConfig(["attn=gqa", "seed=3", "model=nano", "optim.lr=0.1"]))
    assert re.fullmatch(r"gqa_s3,model=nano,optim\.lr=0\.1_[0-9a-f]{6}", name)
    assert re.fullmatch(r"mha_s0_[0-9a-f]{6}", run_name("mha", 0, ListConfig([])))


def test_two_starts_never_share_a_name() -> None:
    names = {run_name("mha", 1, ListConfig(["model=nano"])) for _ in range(50)}
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
    name = run_name("mha", 1, ListConfig([override]))
    assert not set(name) & set("/\\\0\n\t '\"$`;:*?<>|()")
    (tmp_path / name).mkdir()


@pytest.mark.parametrize("value", ["a,b=c_s1", "it's", "back\\slash", "sp ace", "x\\'y", "end\\"])
def test_aquoted_value_is_read_back_by_hydra(value: str) -> None:
    override = OverridesParser.create().parse_override(f"key={quoted(value)}")
    assert override.value() == value
