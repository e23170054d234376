"""Documents in one row are as if each had a row of its own: all of the menu keeps them apart.

It is tested on every file in `conf/attn`, `conf/part` and `conf/position`.
"""

from collections.abc import Sequence

import pytest
import torch
from broken_layers import Mixer
from building import CONTRACT, build_attention, build_gpt, class_of, mechanism_of, menu
from contract import E, T, assert_agree, assert_same, draw, overrides_of, with_maps
from torch import Tensor

from gptattn.attention import Shared
from gptattn.attention.foreign import ForeignAttention
from gptattn.position import Documents

APART = [name for name in CONTRACT if class_of("attn", mechanism_of(name)).keeps_documents]


def numbers(rows: Sequence[Sequence[int]]) -> Tensor:
    """The number of each token's document, of rows of documents of these lengths."""
    each = [[n for n, length in enumerate(row) for _ in range(length)] for row in rows]
    return torch.tensor(each)


def documents(x: Tensor, rows: Sequence[Sequence[int]]) -> list[Tensor]:
    """Each document of x [B, T, ...] as a row of its own, in their order."""
    return [part[None] for row, own in zip(x, rows, strict=True) for part in row.split(list(own))]


def test_what_does_not_keep_documents_apart_refuses_them():
    attention = ForeignAttention(Mixer(E, E), E, E, T)
    shared = Shared(Documents.numbered(numbers([(4, 7)])))
    with pytest.raises(ValueError, match="documents:"):
        attention(torch.randn(1, T, E), None, shared)


# Every mechanism with one position, and multi-head attention with every one.
PLACES = [
    ("mha" if i < len(menu("position")) else variant, menu("position")[i % len(menu("position"))])
    for i, variant in enumerate([*menu("position"), *APART])
]


@pytest.mark.parametrize(("variant", "position"), PLACES)
def test_a_model_keeps_documents_apart_with_every_position_encoding(variant, position):
    model = build_gpt(*overrides_of(variant, position), std=0.3).double()
    rows = ((4, 7), (11,), (1, 1, 2, 6, 1))
    ids, targets = torch.randint(13, (2, len(rows), T))
    losses = [
        model.loss(part, own) * own.numel()
        for part, own in zip(documents(ids, rows), documents(targets, rows), strict=True)
    ]
    mean = torch.stack(losses).sum() / ids.numel()
    assert_agree(model.loss(ids, targets, numbers(rows)), mean, [*model.parameters()], 1e-11)


LONG = ((300,), (299, 1), (7, 150, 143), (130,) * 2 + (40,), (1,) * 10 + (290,))
WIDE = {"d_in": 8, "d_out": 8, "num_heads": 2, "context_length": 300}


@pytest.mark.parametrize("window", [None, 131])
@pytest.mark.parametrize("variant", ["mha", "gqa+forget", "differential"])
def test_rows_of_many_blocks_keep_documents_apart(variant, window):
    sizes = WIDE | ({"num_kv_heads": 1} if mechanism_of(variant) == "gqa" else {})
    attention = build_attention(variant, **sizes, window=window).double()
    x = draw(len(LONG), 300, 8).requires_grad_()
    together = attention(x, None, Shared(Documents.numbered(numbers(LONG))))
    alone = [attention(part) for part in documents(x, LONG)]
    assert_agree(documents(together, LONG), alone, [x, *attention.parameters()], atol=1e-11)


@pytest.mark.parametrize("variant", APART)
def test_maps_show_no_weight_between_documents(variant):
    attention = with_maps(build_attention(variant).double())
    x = draw(2, T, E)
    rows = [(4, 7), (1, 10)]
    number_BT = numbers(rows)
    w_BHTS = attention.attention_weights(x, Shared(Documents.numbered(number_BT)))
    apart = number_BT[:, :, None] != number_BT[:, None, :]
    assert not w_BHTS.movedim(1, -1)[apart].any()
    first = attention.attention_weights(x[:1, 4:])
    assert_same(w_BHTS[:1, :, 4:, 4:], first)
