"""What a part may not do to a mechanism or to other parts, told where the layer is built."""

import pytest

from gptattn.attention import GroupedQueryAttention
from gptattn.attention.base import window_of
from gptattn.attention.parts.base import Entry, Part


class Keeps(Part):
    def __init__(self, entry: str) -> None:
        super().__init__()
        self.entry = entry

    def kept(self) -> dict[str, Entry]:
        return {self.entry: Entry(1, 1)}

    def entries(self, x_BTE, cache):
        return {self.entry: x_BTE[:, None, :, :1]}


def layer() -> GroupedQueryAttention:
    return GroupedQueryAttention(30, 30, 11, 6, num_kv_heads=3)


@pytest.mark.parametrize("entry", ["k", "v", "log"])
def test_no_two_entries_of_a_cache_share_a_name(entry):
    attention = layer()
    attention.add_part("first", Keeps("log"))
    with pytest.raises(ValueError, match=f"^second keeps {entry} in the cache"):
        attention.add_part("second", Keeps(entry))


def test_a_share_of_the_context_is_rounded_up_as_one_counts():
    cases = [(0.07, 100), (0.55, 100), (0.14, 50), (0.28, 50), (0.25, 11), (0.001, 100)]
    assert [window_of(share, context) for share, context in cases] == [7, 55, 7, 14, 3, 1]


# Both warnings are raised by Dynamo.
