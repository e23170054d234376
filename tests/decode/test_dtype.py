"""Decoding in bfloat16: as exact as the format allows, and chosen where it is faster."""

import pytest
import torch
from building import build_gpt, menu

from gptattn.decode import generate as module
from gptattn.decode.generate import DecodeDType, choose_dtype, time_tokens
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


def test_float32_is_the_model_itself_and_bfloat16_a_copy():
    model, ids = model_of(), torch.zeros(1, 1, dtype=torch.long)
    half = choose_dtype(model, "bfloat16", ids)
    assert choose_dtype(model, "float32", ids) is model
    assert {p.dtype for p in half.parameters()} == {HALF}
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("wide", "half", "expected"),
    [(3.0, 1.0, HALF), (1.0, 3.0, torch.float32), (1.05, 1.0, torch.float32)],
)
def test_auto_takes_bfloat16_where_it_is_clearly_faster(monkeypatch, wide, half, expected):
    monkeypatch.setattr(module, "time_tokens", lambda models, ids: [wide, half])
    auto: DecodeDType = "auto"
    chosen = choose_dtype(model_of(), auto, torch.zeros(1, 1, dtype=torch.long))
    assert next(chosen.parameters()).dtype == expected


def test_the_trial_leaves_the_models_unprepared_and_draws_no_numbers():
    models, before = [model_of(), model_of("gqa").to(HALF)], torch.get_rng_state()
    seconds = time_tokens(models, torch.randint(V, (2, 3), generator=torch.Generator()))
    assert len(seconds) == 2
    assert min(seconds) > 0
    assert torch.equal(torch.get_rng_state(), before)
    assert all(model._prepared_head is None for model in models)
