"""What a part may not do to a mechanism or to other parts, told where the layer is built."""

from dataclasses import replace

import pytest
import torch
from building import build_attention, build_gpt

from gptattn.attention import GroupedQueryAttention, Rule
from gptattn.attention.base import window_of
from gptattn.attention.parts.base import Entry, Part
from gptattn.errors import ConfigError


class Keeps(Part):
    def __init__(self, entry: str) -> None:
        super().__init__()
        self.entry = entry

    def kept(self) -> dict[str, Entry]:
        return {self.entry: Entry(1, 1)}

    def entries(self, x_BTE, cache):
        return {self.entry: x_BTE[:, None, :, :1]}


class Narrows(Part):
    def rule(self, rule: Rule, queries, keys) -> Rule:
        return replace(rule, window=3)


def layer() -> GroupedQueryAttention:
    return GroupedQueryAttention(30, 30, 11, 6, num_kv_heads=3)


@pytest.mark.parametrize("entry", ["k", "v", "log"])
def test_no_two_entries_of_a_cache_share_a_name(entry):
    attention = layer()
    attention.add_part("first", Keeps("log"))
    with pytest.raises(ValueError, match=f"^second keeps {entry} in the cache"):
        attention.add_part("second", Keeps(entry))


def test_a_window_is_not_a_parts_to_set():
    with pytest.raises(ValueError, match=r"^narrow changes the window"):
        layer().add_part("narrow", Narrows())


@pytest.mark.parametrize("part", ["sink", "softcap"])
def test_a_mechanism_keeps_its_own_sink_and_soft_cap(part):
    attention = build_attention("probe_sunk")
    assert attention.rule().sink_H is not None
    with pytest.raises(ConfigError, match=f"^part.{part}: the mechanism has its own s"):
        build_gpt("attn=probe_sunk", f"part={part}")


def test_a_share_of_the_context_is_rounded_up_as_one_counts():
    cases = [(0.07, 100), (0.55, 100), (0.14, 50), (0.28, 50), (0.25, 11), (0.001, 100)]
    assert [window_of(share, context) for share, context in cases] == [7, 55, 7, 14, 3, 1]


# Both warnings are raised by Dynamo.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@torch.no_grad()
def test_compiled_blocks_take_texts_of_another_length():
    model = build_gpt("attn=gqa", "part=sink").eval()
    ids = torch.randint(13, (2, 11))
    expected = [model(ids[:, :T]) for T in (7, 11, 5)]
    for block in model.layers():
        block.compile(backend="eager")
    for T, one in zip((7, 11, 5), expected, strict=True):
        torch.testing.assert_close(model(ids[:, :T]), one)
