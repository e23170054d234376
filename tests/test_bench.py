"""The benchmark's figures, worked by hand, and the layers that it times."""

import pytest
import torch
from building import build_gpt, chosen, through_cache
from contract import assert_same
from measuring.menu import Stack
from measuring.tables import ratio, spread

from gptattn.attention import CacheGroup


def test_a_ratio_is_paired_by_round_and_a_spread_is_half_of_the_middle_half():
    # The rounds' ratios are 2, 1 and 4; the quotient of the medians would be 3 / 2.
    assert ratio([2.0, 3.0, 8.0], [1.0, 3.0, 2.0]) == 2
    # Of 1 to 8 the quarters lie at 3 and 6, and the median is 4.5.
    assert spread([8.0, 1.0, 7.0, 2.0, 6.0, 3.0, 5.0, 4.0]) == pytest.approx(1.5 / 4.5)


@pytest.mark.parametrize("variant", ["cross_layer", "gqa+value_residual"])
def test_layers_in_a_row_do_what_the_model_does(variant):
    model = build_gpt(*chosen(variant), "model.num_layers=3", "position=none", std=0.3).double()
    stack, ids = Stack(model.layers()), torch.randint(13, (2, 7))

    def step(part: torch.Tensor, cache: CacheGroup) -> torch.Tensor:
        y = stack(part, cache)
        cache.advance(part.shape[1])
        return y

    with torch.no_grad():
        x = model.token_embedding(ids)
        assert_same(model.norm(stack(x)), model.hidden(ids))
        cached = through_cache(step, x, stack.new_cache(2, 7), [3, 1, 1, 2])
        assert_same(model.norm(cached), model.hidden(ids))
