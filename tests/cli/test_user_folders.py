"""Config folders of a user: which file of a name counts, and the names of the parts in them."""

from pathlib import Path

import pytest
from support import refuses

from gptattn.settings.compose import settings
from gptattn.settings.config import TrainConfig

GQA = "_target_: gptattn.attention.GroupedQueryAttention\nout_proj: true\nbackend: sdpa\n"


def folder(path: Path, scale: float) -> Path:
    """A config folder whose attn/own has this scale."""
    (path / "attn").mkdir(parents=True)
    text = f"{GQA}scale: {scale}\nwindow: null\nnum_kv_heads: 2\n"
    (path / "attn" / "own.yaml").write_text(text)
    return path


def read(own: Path, overrides: list[str]) -> TrainConfig:
    return settings([f"hydra.searchpath=[file://{own}]", *overrides])


def test_a_pattern_and_match_to_read_the_file_that_attn_reads(tmp_path):
    own = folder(tmp_path, 0.5)
    plain = read(own, ["attn=own"]).attn
    assert plain["scale"] == 0.5
    assert read(own, ["pattern=[own]"]).attn == plain
    layers = read(own, ["pattern=[own,mha]"]).layers
    assert layers["own"] == {"attn": plain}
    matched = read(own, ["match_to=own", "match=params", "attn=mha"])
    assert matched.match_attn == plain


def test_a_file_with_the_name_of_one_of_ours_is_refused(tmp_path):
    file = folder(tmp_path, 0.5) / "attn" / "own.yaml"
    file.rename(file.with_name("gqa.yaml"))
    with refuses("attn: rename"):
        read(tmp_path, ["attn=gqa"])


def test_a_file_that_cannot_be_read_is_named_with_its_line(tmp_path):
    file = folder(tmp_path, 0.5) / "attn" / "own.yaml"
    file.write_text(file.read_text().replace("0.5", "0.5\nscale: 1"))
    with refuses("*: duplicate"):
        read(tmp_path, ["attn=own"])


@pytest.mark.parametrize("package", ["part.gate", "part.other"])
def test_a_part_has_the_name_of_its_file(package, tmp_path):
    (tmp_path / "part").mkdir()
    text = f"# @package {package}\n_target_: gptattn.attention.parts.gate.Gate\n"
    (tmp_path / "part" / "gate2.yaml").write_text(text + "granularity: headwise\n")
    with refuses('part: "# @package part.gate2"'):
        read(tmp_path, ["part=[gate,gate2]"])
