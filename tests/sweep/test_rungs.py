"""The sizes of a ladder: `ladder.sizes` and `experiment=ladder`."""

import math
from pathlib import Path

import pytest
import yaml
from support import command, config, run_folders, summary, tiny

from gptattn.errors import ConfigError
from gptattn.settings.build import build_model
from gptattn.settings.compose import CONF, settings
from gptattn.settings.config import LadderConfig
from gptattn.settings.values import typed
from gptattn.sweep.jobs import parameters, rungs


def test_each_size_has_its_width_its_layers_and_tokens_in_proportion() -> None:
    # 12 * 2 * 8 ** 2 = 1,536 and 12 * 3 * 16 ** 2 = 9,216 weights.
    assert rungs(LadderConfig(["8x2", "16x3"], tokens_per_parameter=2.5)) == [
        ["model.d_model=8", "model.num_layers=2", "budget.tokens=3840"],
        ["model.d_model=16", "model.num_layers=3", "budget.tokens=23040"],
    ]
    assert rungs(LadderConfig()) == []


def test_the_parameters_are_the_matrices_of_the_blocks() -> None:
    cfg = settings(["attn=mha", "model.d_model=24", "model.num_layers=3"])
    blocks = build_model(cfg, vocab_size=7).blocks
    matrices = [weight for weight in blocks.parameters() if weight.dim() == 2]
    assert parameters(24, 3) == sum(math.prod(weight.shape) for weight in matrices)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        (["16x2", "8x2"], "8x2 is not larger than the size before; sort them"),
        (["16x2", "16x2"], "16x2 is not larger"),
        (["64"], "'64' is not a size; give model.d_model x model.num_layers, as 64x2"),
        (["0x2"], "'0x2' is not a size"),
    ],
)
def test_sizes_that_are_no_ladder_are_refused(sizes: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=f"ladder.sizes: {said}"):
        rungs(LadderConfig(sizes))


def test_the_experiment_is_a_ladder_of_five_sizes() -> None:
    text = (CONF / "experiment" / "ladder.yaml").read_text(encoding="utf-8")
    node = yaml.safe_load(text)
    assert len(rungs(typed(LadderConfig, node["ladder"]))) == 5
    assert settings(["experiment=ladder"]).sweep.minutes == 60


def arguments(folder: Path, *more: str) -> list[str]:
    own = ["hydra/launcher=basic", "sample.tokens=0", "validation.count=1", "checkpoint=false"]
    return ["-m", *tiny(folder), *own, "experiment_name=a", "ladder.sizes=[8x1,16x2]", *more]


def free(arguments: list[str]) -> list[str]:
    """Leave out what the ladder sets."""
    own = ("budget.", "model.d_model", "model.num_layers")
    return [argument for argument in arguments if not argument.startswith(own)]


def test_every_variant_is_trained_at_every_size(tmp_path: Path) -> None:
    more = ["attn=mha,mqa", "ladder.tokens_per_parameter=0.01"]
    assert command(tmp_path, *free(arguments(tmp_path, *more))) == 0
    runs = run_folders(tmp_path)
    made = {
        (summary(run)["variant"], found["model"]["d_model"], found["budget"]["tokens"])
        for run, found in ((run, config(run)) for run in runs)
    }
    # 12 * 8 ** 2 = 768 and 24 * 16 ** 2 = 6,144 weights, of which a hundredth.
    assert made == {(attn, *size) for attn in ("mha", "mqa") for size in ((8, 8), (16, 61))}
    assert len(runs) == 4


@pytest.mark.parametrize(
    ("more", "field"),
    [
        (["model.d_model=8,16"], "model.d_model"),
        (["budget.seconds=3"], "budget.seconds"),
        (["hydra.sweeper.variants=['attn=mha model.num_layers=1']"], "model.num_layers"),
    ],
)
def test_what_the_ladder_sets_has_no_place_beside_it(
    more: list[str], field: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path, *free(arguments(tmp_path)), *more) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"error: {field}: cannot be combined with ladder.sizes; leave one")
    assert not (tmp_path / "outputs").exists()
