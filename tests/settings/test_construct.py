"""Which classes and functions a config may name, and the arguments that they get."""

import pytest
from support import refuses

from gptattn.errors import ConfigError
from gptattn.settings.construct import check_targets, construct, find_target


@pytest.mark.parametrize(
    "target",
    [
        "torch.nn.Linear",
        "builtins.open",
        "gptattnx.Thing",
        "lightning.pytorch.Trainer",
        # Names inside gptattn that lead to a module which gptattn only imports.
        "gptattn.data.text.os.system",
        "gptattn.runs.checkpoint.torch.load",
    ],
)
def test_a_target_outside_of_the_package_is_refused(target):
    with pytest.raises(ConfigError) as error:
        find_target("attn", {"_target_": target}, [])
    assert error.value.field == "attn._target_"


def test_a_misspelt_class_is_told_in_the_error_alone(caplog):
    with refuses("attn._target_: RotaryPosition?"):
        find_target("attn", {"_target_": "gptattn.position.rope.RotaryPositon"}, [])
    assert not caplog.records  # Hydra would say more


def test_a_whole_record_is_searched_for_foreign_targets():
    own = {"_target_": "gptattn.attention.MultiHeadAttention"}
    board = {"_target_": "lightning.pytorch.loggers.CSVLogger"}
    check_targets({"attn": own, "logger": {"csv": board}}, [])
    foreign = {"logger": {"mine": [{"_target_": "shutil.copyfile"}]}}
    with refuses("logger.mine._target_: shutil"):
        check_targets(foreign, [])
    check_targets(foreign, ["shutil"])


def needs_all(first: int, second: float = 2.0) -> tuple[int, float]:
    """A target with one required argument."""
    if second < 0:
        raise ValueError(f"second={second} is negative; give 0 or more")
    return first, second


def test_a_target_gets_its_own_keys_and_the_shared_ones_that_it_takes():
    spec = {"_target_": f"{__name__}.needs_all", "second": 3}
    assert construct("attn", spec, {"first": 1, "unused": 0}, [__name__.split(".")[0]]) == (1, 3)


@pytest.mark.parametrize(
    ("keys", "shared", "field"),
    [
        ({}, {}, "attn.first"),
        ({"first": 1, "third": 1}, {}, "attn.third"),
        ({"first": "1"}, {}, "attn.first"),
        ({"first": 1, "second": -1.0}, {}, "attn.second"),
        ({"first": 1}, {"second": -1.0}, "attn"),
    ],
)
def test_what_a_target_refuses_is_a_mistake_of_the_named_key(keys, shared, field):
    with pytest.raises(ConfigError) as error:
        construct("attn", {"_target_": f"{__name__}.needs_all", **keys}, shared, [__name__])
    assert error.value.field == field
