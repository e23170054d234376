"""Which classes and functions a config may name, and the arguments that they get."""

import pytest
from support import refuses

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
    with refuses("attn._target_: "):
        find_target("attn", {"_target_": target}, [])


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
    ("keys", "shared", "said"),
    [
        ({}, {}, "attn.first: missing"),
        ({"first": 1, "third": 1}, {}, "attn.third: needs_all"),
        ({"first": "1"}, {}, "attn.first: number"),
        ({"first": 1, "second": -1.0}, {}, "attn.second: negative"),
        ({"first": 1}, {"second": -1.0}, "attn: negative"),
    ],
)
def test_what_a_target_refuses_is_a_mistake_of_the_named_key(keys, shared, said):
    with refuses(said):
        construct("attn", {"_target_": f"{__name__}.needs_all", **keys}, shared, [__name__])
