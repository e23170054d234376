"""The gated short convolution against transformers' own, where rows are padded or hold documents.

test_recipes.py has it whole and token by token, in the layers of LFM2.
"""

import torch
from building import disturb
from contract import assert_same, draw
from hugging import keep_float64, pairs_of_short_conv
from transformers import Lfm2Config
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

from gptattn.attention import Shared
from gptattn.attention.variants.short_conv import GatedShortConvolution
from gptattn.position import Documents

B, T, E = 3, 11, 7


def both(conv_size: int) -> tuple[GatedShortConvolution, Lfm2ShortConv]:
    """Ours and theirs with our weights."""
    mine = GatedShortConvolution(E, E, T, conv_size=conv_size, out_bias=False).double()
    disturb(mine, std=0.3)
    with keep_float64(), torch.no_grad():
        config = Lfm2Config(hidden_size=E, num_attention_heads=1, full_attn_idxs=[])
        config.conv_L_cache = conv_size
        theirs = Lfm2ShortConv(config, layer_idx=0)
        for pair in pairs_of_short_conv(mine, theirs):
            pair.part(pair.theirs).copy_(pair.mine)
    return mine, theirs


def test_left_padding_is_as_if_nothing_were_there_whole_and_by_chunks():
    mine, theirs = both(conv_size=3)
    x, padding_B1 = draw(B, T, E), torch.tensor([[0], [2], [7]])
    at = (torch.arange(T) - padding_B1).clamp_min(-1)
    expected = theirs(x, attention_mask=(at >= 0).double())
    there = at >= 0
    assert_same(mine(x, None, Shared(at))[there], expected[there])
    cache, y = mine.new_cache(B, T), []
    for part, places in zip(x.split([4, 1, 1, 5], 1), at.split([4, 1, 1, 5], 1), strict=True):
        y.append(mine(part, cache, Shared(places)))
        cache.advance(part.shape[1])
    assert_same(torch.cat(y, 1)[there], expected[there])


def test_documents_in_a_row_are_rows_of_their_own():
    mine, theirs = both(conv_size=5)
    x, lengths = draw(1, T, E), [2, 1, 5, 3]
    number = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]
    expected = torch.cat([theirs(part) for part in x.split(lengths, 1)], 1)
    assert_same(mine(x, None, Shared(Documents.numbered(number))), expected)
