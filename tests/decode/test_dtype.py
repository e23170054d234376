"""Decoding in bfloat16: as exact as the format allows."""

import pytest
import torch
from building import build_gpt, menu

from gptattn.model.gpt import GPT

CONTEXT, V = 7, 61
HALF = torch.bfloat16


def model_of(variant: str = "mha") -> GPT:
    sizes = ["model.d_model=36", f"model.context_length={CONTEXT}"]
    return build_gpt(f"attn={variant}", *sizes, vocab_size=V, std=0.2).eval()


@pytest.mark.parametrize("variant", menu("attn"))
@torch.no_grad()
def test_prepared_decoding_is_as_near_to_float64_as_the_plain_forward(variant: str):
    model, rows = model_of(variant).to(HALF), 3
    ids = torch.randint(V, (rows, CONTEXT))
    exact = model.double()(ids)
    model.to(HALF)
    plain = model(ids)
    model.prepare(rows)
    cache = model.new_cache(rows)
    steps = [model.next_logits(ids[:, t : t + 1], cache) for t in range(CONTEXT)]
    decoded = torch.stack(steps, dim=1)
    assert decoded.dtype == plain.dtype == HALF
    of_plain, of_decoded = ((y.double() - exact).abs().max() for y in (plain, decoded))
    assert 0 < of_decoded < 2 * of_plain + exact.abs().max() * 2**-8
